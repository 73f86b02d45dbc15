// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/transfer.h"

#include <thread>

#include <gtest/gtest.h>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"

namespace pagoda::io {
namespace {

struct Fixture {
  std::shared_ptr<ErrorLatch> latch = std::make_shared<ErrorLatch>();
  std::shared_ptr<TransferState> state;

  Transfer begin(std::size_t pieces, TransferCallback callback = {}) {
    state = std::make_shared<TransferState>(latch, std::move(callback));
    state->begin(pieces, state);
    return Transfer(state);
  }
  static std::exception_ptr error(const char* text) {
    return std::make_exception_ptr(EngineError(text));
  }
};

TEST(Transfer, EndsWithItsLastPiece) {
  Fixture fixture;
  Transfer transfer = fixture.begin(2);
  fixture.state->piece_ended(nullptr);
  EXPECT_FALSE(transfer.done());
  std::thread other([&] { fixture.state->piece_ended(nullptr); });
  transfer.wait();
  EXPECT_TRUE(transfer.done());
  other.join();
}

TEST(Transfer, ThrowsTheFirstErrorAndCountsAll) {
  Fixture fixture;
  Transfer transfer = fixture.begin(3);
  fixture.state->piece_ended(Fixture::error("first"));
  fixture.state->piece_ended(nullptr);
  fixture.state->piece_ended(Fixture::error("second"));
  EXPECT_EQ(transfer.error_count(), 2U);
  try {
    transfer.wait();
    FAIL();
  } catch (const EngineError& error) {
    EXPECT_EQ(error.message(), "first");
  }
  transfer = Transfer();
  EXPECT_NO_THROW(fixture.latch->raise()) << "it was seen";
}

TEST(Transfer, ADetachedErrorIsLatched) {
  Fixture fixture;
  std::move(fixture.begin(1)).detach();
  fixture.state->piece_ended(Fixture::error("late"));
  EXPECT_THROW(fixture.latch->raise(), EngineError);
}

TEST(Transfer, AnEmptyOneIsDone) {
  Transfer transfer;
  EXPECT_TRUE(transfer.done());
  transfer.wait();
}

TEST(ErrorLatch, LogsWhatItCannotThrow) {
  std::string lines;
  {
    const log::Capture capture([&](log::Level, const std::string& line) { lines += line + "\n"; });
    ErrorLatch latch;
    latch.set(Fixture::error("one"));
    latch.set(Fixture::error("two"));
  }
  EXPECT_NE(lines.find("one"), std::string::npos);
  EXPECT_NE(lines.find("two"), std::string::npos);
}

}  // namespace
}  // namespace pagoda::io
