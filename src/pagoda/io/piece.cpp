// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/piece.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "pagoda/base/trace.h"
#include "pagoda/io/checksum.h"
#include "pagoda/io/io_error.h"

namespace pagoda::io {
namespace {

constexpr std::uint8_t kMostRetries = 100;

void add(std::atomic<std::uint64_t>& counter, std::uint64_t amount) noexcept {
  counter.fetch_add(amount, std::memory_order_relaxed);
}

}  // namespace

Piece::Piece(Volume& volume, TransferState& transfer, ExtentState& extent, Op kind, const Cut& cut,
             std::byte* memory, std::uint64_t* sums, Priority piece_priority)
    : volume_(volume),
      transfer_(transfer),
      extent_(extent),
      cut_(cut),
      memory_(memory),
      sums_(sums),
      kind_(kind),
      needs_bounce_(kind != Op::Nothing &&
                    (cut.partial() || cut.cover_length() % volume.grid().align != 0 ||
                     !volume.reachable(memory))),
      engine_(volume.engine_index(cut.cover_begin)) {
  priority = piece_priority;
  Claim::begin = cut.cover_begin;
  Claim::end = cut.cover_end;
  Claim::exclusive = kind == Op::Write;
}

std::size_t Piece::sum_count(const Volume& volume, Op kind, const Cut& cut) noexcept {
  if (kind != Op::Write || !volume.checksums() || cut.length() == 0) return 0;
  const Bytes block = volume.grid().block;
  return static_cast<std::size_t>((cut.cover_end - 1) / block - cut.cover_begin / block + 1);
}

template <class Fn>
void Piece::for_each_block(Fn&& fn) const {
  const Bytes block = volume_.grid().block;
  for (Bytes at = cut_.cover_begin; at < cut_.cover_end;) {
    const Bytes stop = std::min(cut_.cover_end, align_down(at, block) + block);
    fn(extent_.sums.index(at), at, stop);
    at = stop;
  }
}

void Piece::hash() noexcept {
  if (kind_ != Op::Write || !checked() || cut_.partial()) return;
  PAGODA_TRACE("io", "hash", {"bytes", cut_.length()});
  std::uint64_t* sum = sums_;
  for_each_block([&](std::size_t, Bytes from, Bytes to) {
    *sum++ = checksum({memory_ + (from - cut_.begin), to - from});
  });
}

void Piece::start(Outbox& outbox) noexcept {
  if (volume_.locks().acquire(*this)) go_on(outbox);
}

void Piece::go_on(Outbox& outbox) noexcept {
  if (state_ == PieceState::Locked) return take_bounce(outbox);  // a buffer came free
  state_ = PieceState::Locked;
  if (kind_ == Op::Nothing) return fail(nullptr, outbox);
  if (checked() && (kind_ == Op::Read || cut_.partial())) {
    if (std::exception_ptr error = unreadable()) return fail(std::move(error), outbox);
  }
  if (!needs_bounce_) return issue(kind_, memory_, outbox);
  std::byte* buffer = volume_.bounce().acquire(*this);
  if (buffer == nullptr) return;  // in line: this piece is another thread's from here on
  bounce_ = buffer;
  take_bounce(outbox);
}

std::exception_ptr Piece::unreadable() const {
  std::exception_ptr error;
  for_each_block([&](std::size_t index, Bytes from, Bytes to) {
    const BlockState known = extent_.sums.state(index);
    if (error != nullptr || known == BlockState::Written) return;
    // A first write of part of a block fills the rest with zeros.
    if (known == BlockState::Unwritten && kind_ == Op::Write) return;
    error = known == BlockState::Unwritten
                ? error_at("read of a block that was never written", from, to, ENODATA)
                : error_at("block lost by an earlier write that failed", from, to, EIO);
  });
  return error;
}

void Piece::take_bounce(Outbox& outbox) noexcept {
  add(volume_.counters().bounced_bytes, cut_.length());
  if (kind_ == Op::Read) return issue(Op::Read, bounce_, outbox);
  if (cut_.partial()) {
    add(volume_.counters().modified_blocks, 1);
    const bool fresh = checked() && extent_.sums.state(extent_.sums.index(cut_.cover_begin)) ==
                                        BlockState::Unwritten;
    if (!fresh) return issue(Op::Read, bounce_, outbox);
    std::memset(bounce_, 0, request_length());
    return modify(outbox);
  }
  std::memcpy(bounce_, memory_, cut_.length());
  std::memset(bounce_ + cut_.length(), 0, request_length() - cut_.length());
  issue(Op::Write, bounce_, outbox);
}

Bytes Piece::request_length() const noexcept {
  return align_up(cut_.cover_length(), volume_.grid().align);
}

void Piece::issue(Op how, std::byte* target, Outbox& outbox) noexcept {
  state_ = how == Op::Read ? PieceState::Reading : PieceState::Writing;
  op = how;
  target_ = target;
  data = target;
  offset = volume_.map().place(cut_.cover_begin).offset;
  length = request_length();
  retries_ = 0;
  outbox.submit(*this);
}

void Piece::complete(std::int64_t result) noexcept {
  Outbox outbox(volume_);
  if (state_ == PieceState::Failing) {
    end(std::move(error_), outbox);
  } else if (arrived(result, outbox)) {
    if (state_ == PieceState::Writing) {
      finish_write(outbox);
    } else if (kind_ == Op::Read) {
      finish_read(outbox);
    } else {
      std::exception_ptr error = verify(bounce_);
      error == nullptr ? modify(outbox) : end(std::move(error), outbox);
    }
  }
  outbox.flush();
}

bool Piece::arrived(std::int64_t result, Outbox& outbox) noexcept {
  add(volume_.counters().requests, 1);
  const char* what = op == Op::Read ? "read failed" : "write failed";
  int error_number = 0;
  if (result == -EINTR || result == -EAGAIN) {
    if (++retries_ > kMostRetries) error_number = static_cast<int>(-result);
  } else if (result < 0) {
    error_number = static_cast<int>(-result);
  } else if (result == 0 || static_cast<Bytes>(result) > length) {
    // Nothing moved though no error was named: the end of a file that should be longer.
    error_number = EIO;
  } else {
    auto& moved = op == Op::Read ? volume_.counters().device_bytes_read
                                 : volume_.counters().device_bytes_written;
    add(moved, static_cast<std::uint64_t>(result));
    if (static_cast<Bytes>(result) == length) return true;
    add(volume_.counters().short_transfers, 1);
    // Goes on where an aligned request can; a direct one may repeat the last few bytes.
    const Bytes progress = align_down(static_cast<Bytes>(result), volume_.grid().align);
    retries_ = progress > 0 ? std::uint8_t{0} : static_cast<std::uint8_t>(retries_ + 1);
    if (retries_ > kMostRetries) error_number = EIO;
    data += progress;
    offset += progress;
    length -= progress;
  }
  if (error_number == 0) {
    outbox.submit(*this);
    return false;
  }
  if (state_ == PieceState::Writing && checked()) {
    for_each_block([&](std::size_t index, Bytes, Bytes) { extent_.sums.set_lost(index); });
  }
  end(std::make_exception_ptr(
          IoError(what, volume_.files()[volume_.map().place(cut_.cover_begin).file].path(), offset,
                  length, error_number)),
      outbox);
  return false;
}

std::exception_ptr Piece::verify(const std::byte* bytes) noexcept {
  std::exception_ptr error;
  if (!checked()) return error;
  PAGODA_TRACE("io", "verify", {"bytes", cut_.cover_length()});
  for_each_block([&](std::size_t index, Bytes from, Bytes to) {
    if (error != nullptr) return;
    const std::uint64_t actual = checksum({bytes + (from - cut_.cover_begin), to - from});
    const std::uint64_t expected = extent_.sums.sum(index);
    if (actual == expected) return;
    add(volume_.counters().checksum_errors, 1);
    const StripeMap::Place place = volume_.map().place(from);
    error = std::make_exception_ptr(ChecksumError(volume_.files()[place.file].path(), place.offset,
                                                  to - from, expected, actual));
  });
  return error;
}

void Piece::finish_read(Outbox& outbox) noexcept {
  std::exception_ptr error = verify(target_);
  if (error == nullptr) {
    if (bounce_ != nullptr) {
      std::memcpy(memory_, bounce_ + (cut_.begin - cut_.cover_begin), cut_.length());
    }
    add(volume_.counters().bytes_read, cut_.length());
  }
  end(std::move(error), outbox);
}

void Piece::modify(Outbox& outbox) noexcept {
  std::memcpy(bounce_ + (cut_.begin - cut_.cover_begin), memory_, cut_.length());
  if (checked()) *sums_ = checksum({bounce_, cut_.cover_length()});
  issue(Op::Write, bounce_, outbox);
}

void Piece::finish_write(Outbox& outbox) noexcept {
  if (checked()) {
    const std::uint64_t* sum = sums_;
    for_each_block(
        [&](std::size_t index, Bytes, Bytes) { extent_.sums.set_written(index, *sum++); });
  }
  add(volume_.counters().bytes_written, cut_.length());
  end(nullptr, outbox);
}

void Piece::fail(std::exception_ptr error, Outbox& outbox) noexcept {
  // By way of the engine, so that a callback never runs inside the call that starts a transfer.
  error_ = std::move(error);
  state_ = PieceState::Failing;
  op = Op::Nothing;
  outbox.submit(*this);
}

void Piece::end(std::exception_ptr error, Outbox& outbox) noexcept {
  if (error != nullptr) add(volume_.counters().errors, 1);
  if (bounce_ != nullptr) {
    if (Waiter* waiter = volume_.bounce().release(bounce_)) {
      auto& next = static_cast<Piece&>(*waiter);
      next.bounce_ = bounce_;
      outbox.run(next);
    }
  }
  for (Claim* claim = volume_.locks().release(*this); claim != nullptr;) {
    auto& next = static_cast<Piece&>(*claim);
    claim = BlockLocks::next(*claim);
    outbox.run(next);
  }
  transfer_.piece_ended(std::move(error));  // last: this piece may be gone afterwards
}

std::exception_ptr Piece::error_at(const char* what, Bytes from, Bytes to, int error_number) const {
  const StripeMap::Place place = volume_.map().place(from);
  return std::make_exception_ptr(
      IoError(what, volume_.files()[place.file].path(), place.offset, to - from, error_number));
}

}  // namespace pagoda::io
