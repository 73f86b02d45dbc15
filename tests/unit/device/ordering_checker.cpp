// SPDX-License-Identifier: Apache-2.0
#include "pagoda/device/ordering_checker.h"

#include <cstdlib>
#include <functional>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pagoda/base/budget.h"
#include "pagoda/base/log.h"
#include "pagoda/device/arena.h"
#include "pagoda/device/emulated/emulated_device.h"
#include "pagoda/device/pinned_arena.h"

namespace pagoda::device {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class OrderingCheckerTest : public ::testing::Test {
 protected:
  static constexpr Bytes kPage = 4096;

  void upload() {
    copies_->copy_async(page_.data(), staging_.on(*copies_), kPage, Direction::HostToDevice,
                        "page 12");
  }
  void kernel(Stream& stream, Use use) {
    stream.enqueue("matmul", [] {}, {use});
  }

  /// The message of the violation that `call` throws, which must be the only one.
  std::string violation(const std::function<void()>& call) {
    std::string message;
    try {
      call();
      return "no violation";
    } catch (const OrderingViolation& error) {
      message = error.message();
    }
    EXPECT_THROW(checker_->check(), OrderingViolation);
    const std::vector<std::string> all = checker_->take_violations();
    EXPECT_THAT(all, ::testing::ElementsAre(message));
    checker_->check();
    return message;
  }

  Budget budget_{"test", 16_MiB};
  std::shared_ptr<OrderingChecker> checker_ = std::make_shared<OrderingChecker>();
  std::shared_ptr<Device> device_ = emulated::make_device({.checker = checker_});
  Arena arena_{device_, budget_.reserve(1_MiB, "device"), {.name = "device arena"}};
  PinnedArena pinned_{device_, budget_.reserve(1_MiB, "pinned"), {.name = "pinned arena"}};
  std::shared_ptr<Stream> copies_ = device_->make_stream({.name = "copies"});
  std::shared_ptr<Stream> compute_ = device_->make_stream({.name = "compute"});
  std::shared_ptr<Event> event_ = device_->make_event();
  Block staging_ = pinned_.allocate(kPage, "staging 0");
  Block page_ = arena_.allocate(kPage, *copies_, "weights");
};

TEST_F(OrderingCheckerTest, AReadNeedsTheEventOfTheWrite) {
  upload();
  EXPECT_THAT(violation([&] { kernel(*compute_, Use::reads(page_.data(), 100)); }),
              AllOf(HasSubstr("function 'matmul' on stream 'compute' reads"),
                    HasSubstr("bytes [0, 100) of block 'weights' of 'device arena'"),
                    HasSubstr("h2d copy 'page 12' on stream 'copies' wrote"),
                    HasSubstr("has waited for no event that stream 'copies' recorded after")));
  copies_->record(*event_);
  compute_->wait(*event_);
  kernel(*compute_, Use::reads(page_.data(), kPage));
}

TEST_F(OrderingCheckerTest, AnEventRecordedTooEarlyDoesNotHelp) {
  copies_->record(*event_);
  upload();
  compute_->wait(*event_);
  EXPECT_THAT(violation([&] { kernel(*compute_, Use::reads(page_.data(), 1)); }),
              HasSubstr("wrote"));
}

TEST_F(OrderingCheckerTest, AWriteNeedsTheEventOfTheRead) {
  upload();
  copies_->record(*event_);
  compute_->wait(*event_);
  kernel(*compute_, Use::reads(page_.data(), kPage));
  EXPECT_THAT(violation([&] { upload(); }),
              AllOf(HasSubstr("h2d copy 'page 12' on stream 'copies' writes"),
                    HasSubstr("function 'matmul' on stream 'compute' read,")));
}

TEST_F(OrderingCheckerTest, AWriteNeedsTheEventOfTheWrite) {
  upload();
  EXPECT_THAT(violation([&] { compute_->fill_async(page_.data(), std::byte{0}, 8, "zero"); }),
              AllOf(HasSubstr("fill 'zero'"), HasSubstr("writes"), HasSubstr("wrote")));
}

TEST_F(OrderingCheckerTest, OtherBytesOfABlockAreFree) {
  compute_->wait(*event_);
  copies_->record(*event_);  // the allocation is on `copies`
  compute_->wait(*event_);
  copies_->fill_async(page_.data(), std::byte{1}, 2048);
  compute_->fill_async(page_.data() + 2048, std::byte{1}, 2048);
  EXPECT_THAT(violation([&] { compute_->fill_async(page_.data() + 2047, std::byte{1}, 2); }),
              HasSubstr("bytes [2047, 2048)"));
}

TEST_F(OrderingCheckerTest, OrderIsPassedOnThroughAThirdStream) {
  const auto third = device_->make_stream({.name = "third"});
  const auto second = device_->make_event();
  upload();
  copies_->record(*event_);
  third->wait(*event_);
  third->record(*second);
  compute_->wait(*second);
  kernel(*compute_, Use::reads(page_.data(), kPage));
}

TEST_F(OrderingCheckerTest, OrderIsPassedOnThroughTheHost) {
  upload();
  copies_->synchronize();
  kernel(*compute_, Use::writes(page_.data(), kPage));
  compute_->record(*event_);
  event_->wait();
  upload();
}

TEST_F(OrderingCheckerTest, TheHostMustWaitToo) {
  Block out = pinned_.allocate(kPage, *copies_, "out");
  upload();
  copies_->copy_async(out.data(), page_.data(), kPage, Direction::DeviceToHost, "result");
  EXPECT_THAT(violation([&] { checker_->host_read(out.data(), kPage, "checksum"); }),
              AllOf(HasSubstr("checksum on the host reads"), HasSubstr("d2h copy 'result'")));
  EXPECT_THAT(violation([&] { checker_->host_write(staging_.data(), kPage, "next page"); }),
              AllOf(HasSubstr("next page on the host writes"), HasSubstr("h2d copy 'page 12'")));
  copies_->synchronize();
  checker_->host_read(out.data(), kPage, "checksum");
  checker_->host_write(staging_.data(), kPage, "next page");
}

TEST_F(OrderingCheckerTest, AFreedBlockMayNotBeUsed) {
  std::byte* data = page_.data();
  page_.free();
  EXPECT_THAT(violation([&] { copies_->fill_async(data, std::byte{0}, 8); }),
              AllOf(HasSubstr("the freed block 'weights'"), HasSubstr("not in a live block")));
}

TEST_F(OrderingCheckerTest, ABlockEndsWhereItWasAskedToEnd) {
  Block odd = arena_.allocate(1000, *copies_, "odd");
  copies_->fill_async(odd.data(), std::byte{0}, 1000);
  EXPECT_THAT(violation([&] { copies_->fill_async(odd.data(), std::byte{0}, 1001); }),
              HasSubstr("1 bytes past the end of block 'odd'"));
  const auto memory = device_->allocate(MemoryKind::Device, 100, {.name = "plain"});
  EXPECT_THAT(violation([&] { copies_->fill_async(memory->data() + 50, std::byte{0}, 51); }),
              HasSubstr("1 bytes past the end of 'plain'"));
}

TEST_F(OrderingCheckerTest, ReuseBehindTheArenasBackIsCaught) {
  // The compute stream used the block, but nobody said so: freeing it cannot wait for that stream.
  upload();
  copies_->record(*event_);
  compute_->wait(*event_);
  kernel(*compute_, Use::reads(page_.data(), kPage));
  page_.free();
  EXPECT_THAT(violation([&] { Block next = arena_.allocate(kPage, *copies_, "next"); }),
              AllOf(HasSubstr("allocation on stream 'copies'"), HasSubstr("block 'next'"),
                    HasSubstr("function 'matmul' on stream 'compute'")));
}

TEST_F(OrderingCheckerTest, ABlockIsReadyForItsOwnStreamOnly) {
  Block block = arena_.allocate(kPage, *copies_, "fresh");
  EXPECT_THAT(violation([&] { compute_->fill_async(block.data(), std::byte{0}, 8); }),
              HasSubstr("allocation on stream 'copies'"));
}

TEST_F(OrderingCheckerTest, CopiesMustGoWhereTheySay) {
  EXPECT_THAT(violation([&] {
                copies_->copy_async(page_.data(), staging_.data(), 8, Direction::DeviceToHost);
              }),
              AllOf(HasSubstr("d2h copy's source"), HasSubstr("pinned")));
}

TEST_F(OrderingCheckerTest, AViolationHasNoEffect) {
  upload();
  EXPECT_THROW(compute_->fill_async(page_.data(), std::byte{0xFF}, kPage), OrderingViolation);
  checker_->take_violations();
  EXPECT_TRUE(compute_->idle());
}

TEST_F(OrderingCheckerTest, AViolationOnAWorkerIsNotLost) {
  upload();
  std::jthread([&] {
    try {
      kernel(*compute_, Use::reads(page_.data(), 1));
    } catch (const OrderingViolation&) {  // a careless worker
    }
  }).join();
  EXPECT_THROW(checker_->check(), OrderingViolation);
  EXPECT_EQ(checker_->take_violations().size(), 1u);
}

TEST(OrderingChecker, ViolationsNobodyTookAreLogged) {
  std::string lines;
  const log::Capture capture([&](log::Level, const std::string& line) { lines += line; });
  {
    auto checker = std::make_shared<OrderingChecker>();
    const auto device = emulated::make_device({.checker = checker});
    const auto stream = device->make_stream({.name = "s"});
    const auto memory = device->allocate(MemoryKind::Device, 100, {.name = "plain"});
    EXPECT_THROW(stream->fill_async(memory->data(), std::byte{0}, 101), OrderingViolation);
  }
  EXPECT_THAT(lines, HasSubstr("past the end of 'plain'"));
}

TEST(OrderingChecker, SeparateHostThreadsNeedAHandOver) {
  auto checker = std::make_shared<OrderingChecker>(OrderingChecker::HostThreads::Separate);
  const auto device = emulated::make_device({.checker = checker});
  const auto stream = device->make_stream({.name = "s"});
  const auto memory = device->allocate(MemoryKind::Pinned, 100, {.name = "plain"});
  stream->fill_async(memory->data(), std::byte{0}, 100);
  stream->synchronize();
  const VectorClock known = checker->publish();
  std::jthread([&] {
    EXPECT_THROW(checker->host_read(memory->data(), 100, "worker"), OrderingViolation);
    checker->acquire(known);
    checker->host_read(memory->data(), 100, "worker");
  }).join();
  EXPECT_EQ(checker->take_violations().size(), 1u);
}

TEST(OrderingChecker, SeparateHostThreadsShareAnArena) {
  auto checker = std::make_shared<OrderingChecker>(OrderingChecker::HostThreads::Separate);
  const auto device = emulated::make_device({.checker = checker});
  Budget budget("device", 1_MiB);
  Arena arena(device, budget.reserve(1_MiB, "arena"));
  for (int i = 0; i < 8; ++i) {
    std::jthread([&] {
      const auto stream = device->make_stream({.name = "s"});
      Block block = arena.allocate(1_MiB, *stream);
      stream->fill_async(block.data(), std::byte{0}, 1_MiB);
      if (i % 2 == 0) stream->synchronize();
    }).join();
  }
  checker->check();
}

TEST(OrderingChecker, TheEnvironmentTurnsItOn) {
  ::unsetenv("PAGODA_CHECK_ORDER");
  EXPECT_EQ(OrderingChecker::from_environment(), nullptr);
  EXPECT_EQ(emulated::make_device()->checker(), nullptr);
  ::setenv("PAGODA_CHECK_ORDER", "1", 1);
  EXPECT_NE(emulated::make_device()->checker(), nullptr);
  ::setenv("PAGODA_CHECK_ORDER", "yes", 1);
  EXPECT_THROW(OrderingChecker::from_environment(), UserError);
  ::unsetenv("PAGODA_CHECK_ORDER");
}

}  // namespace
}  // namespace pagoda::device
