// SPDX-License-Identifier: Apache-2.0
#include "pagoda/io/swap_space.h"

#include <atomic>
#include <new>
#include <optional>
#include <utility>

#include "pagoda/base/trace.h"
#include "pagoda/io/piece.h"
#include "pagoda/io/volume.h"

namespace pagoda::io {
namespace {

constexpr Bytes kHashedAhead = 4_MiB;  // hashed before what is hashed already is submitted

/// A transfer's pieces and what they need while they run.
class PieceTransfer final : public TransferState {
 public:
  PieceTransfer(Volume& volume, std::shared_ptr<ErrorLatch> latch, TransferCallback callback)
      : TransferState(std::move(latch), std::move(callback)), volume_(volume) {}

  std::vector<Piece> pieces;
  std::vector<std::uint64_t> sums;
  std::vector<std::shared_ptr<ExtentState>> extents;

 private:
  void ended() noexcept override {
    extents.clear();
    volume_.transfer_ended();
  }

  Volume& volume_;
};

}  // namespace

struct SwapSpace::State {
  State(const Options& options, Budget& budget)
      : capacity(align_up(options.capacity, ExtentAllocator::kAlignment)),
        sum_block(options.checksums ? options.checksum_block : 0),
        bounce_bytes(options.bounce_buffers * options.io_bytes),
        reservation(budget.reserve(capacity, "swap space")),
        allocator(std::make_shared<ExtentAllocator>(capacity)),
        latch(std::make_shared<ErrorLatch>()),
        volume(options, capacity) {}

  const Bytes capacity;
  const Bytes sum_block;  // 0: no checksums
  const Bytes bounce_bytes;
  Reservation reservation;
  const std::shared_ptr<ExtentAllocator> allocator;
  const std::shared_ptr<std::atomic<Bytes>> sum_memory = std::make_shared<std::atomic<Bytes>>(0);
  const std::shared_ptr<ErrorLatch> latch;
  Volume volume;  // last: waits for its transfers before the rest goes
};

SwapSpace::SwapSpace(const Options& options, Budget& budget)
    : state_(std::make_unique<State>(options, budget)) {}

SwapSpace::~SwapSpace() {
  // The threads are not here, and what they held is: nothing of it can be taken down.
  if (!owner_.here()) static_cast<void>(state_.release());
}

Extent SwapSpace::allocate(Bytes length) {
  check();
  const std::optional<Bytes> offset = state_->allocator->allocate(length);
  if (!offset) {
    const ExtentAllocator::Stats stats = state_->allocator->stats();
    throw BudgetExceeded(
        fmt::format("nvme_budget = {} has {} left, {} of it in one piece, and {} are needed: raise "
                    "nvme_budget to at least {}",
                    format_bytes(stats.capacity), format_bytes(stats.capacity - stats.used),
                    format_bytes(stats.largest_hole), format_bytes(length),
                    format_bytes_up(stats.capacity + ExtentAllocator::rounded(length))),
        "nvme_budget", stats.capacity, length, stats.largest_hole);
  }
  try {
    return Extent(std::make_shared<ExtentState>(state_->allocator, *offset, length,
                                                state_->sum_block, state_->sum_memory));
  } catch (const std::bad_alloc&) {
    state_->allocator->free(*offset, length);
    throw;
  }
}

Bytes SwapSpace::sum_bytes(Bytes length) const noexcept {
  if (state_->sum_block == 0 || length == 0) return 0;
  return ((length - 1) / state_->sum_block + 2) * (sizeof(std::uint64_t) + sizeof(BlockState));
}

Transfer SwapSpace::read(const Extent& extent, Bytes offset, std::span<std::byte> memory,
                         TransferCallback callback) {
  const Move move{Op::Read, &extent, offset, memory.data(), memory.size()};
  return submit({&move, 1}, std::move(callback));
}

Transfer SwapSpace::write(const Extent& extent, Bytes offset, std::span<const std::byte> memory,
                          TransferCallback callback) {
  // Never written to: a Request has one pointer for both directions.
  auto* bytes = const_cast<std::byte*>(memory.data());
  const Move move{Op::Write, &extent, offset, bytes, memory.size()};
  return submit({&move, 1}, std::move(callback));
}

Transfer SwapSpace::submit(std::span<const Move> moves, TransferCallback callback) {
  check();
  PAGODA_TRACE("io", "submit", {"moves", moves.size()});
  Volume& volume = state_->volume;
  auto transfer = std::make_shared<PieceTransfer>(volume, state_->latch, std::move(callback));

  // Everything is cut and allocated before anything starts: from then on nothing here can throw.
  std::vector<Cut> cuts;
  std::vector<std::size_t> cuts_end;
  std::size_t sum_count = 0;
  for (const Move& move : moves) {
    const ExtentState* extent = move.extent->state_.get();
    PAGODA_REQUIRE(extent != nullptr && extent->allocator == state_->allocator,
                   "the extent is not one of this swap space");
    PAGODA_REQUIRE(move.offset <= extent->length && move.length <= extent->length - move.offset,
                   "{} of {} bytes at {} in an extent of {} bytes", op_name(move.op), move.length,
                   move.offset, extent->length);
    const std::size_t first = cuts.size();
    const Bytes begin = extent->begin + move.offset;
    cut_range(volume.grid(), extent->begin, extent->end(), begin, begin + move.length, cuts);
    for (std::size_t i = first; i < cuts.size(); ++i) {
      sum_count += Piece::sum_count(volume, move.op, cuts[i]);
    }
    cuts_end.push_back(cuts.size());
    transfer->extents.push_back(move.extent->state_);
  }
  if (cuts.empty()) {  // nothing to move: one piece brings the callback to an engine's thread
    if (moves.empty()) return Transfer();
    cuts.push_back({});
    cuts_end.back() = 1;
  }
  transfer->sums.resize(sum_count);
  transfer->pieces.reserve(cuts.size());
  std::uint64_t* sums = transfer->sums.data();
  std::size_t next = 0;
  for (std::size_t i = 0; i < moves.size(); ++i) {
    const Move& move = moves[i];
    for (std::byte* memory = move.memory; next < cuts_end[i]; ++next) {
      const Cut& cut = cuts[next];
      const Op op = cut.length() > 0 ? move.op : Op::Nothing;
      transfer->pieces.emplace_back(volume, *transfer, *transfer->extents[i], op, cut, memory, sums,
                                    move.priority);
      sums += Piece::sum_count(volume, op, cut);
      memory += cut.length();
    }
  }

  volume.transfer_began();
  transfer->begin(transfer->pieces.size(), transfer);
  Outbox outbox(volume);
  Bytes hashed = 0;
  for (std::size_t i = 0; i < cuts.size(); ++i) {
    Piece& piece = transfer->pieces[i];
    piece.hash();
    hashed += cuts[i].length();
    piece.start(outbox);
    if (hashed >= kHashedAhead) {
      outbox.flush();
      hashed = 0;
    }
  }
  outbox.flush();
  return Transfer(std::move(transfer));
}

void SwapSpace::check() {
  owner_.require("a swap space");
  state_->latch->raise();
}

Bytes SwapSpace::capacity() const noexcept {
  return state_->capacity;
}

std::string_view SwapSpace::engine_name() const noexcept {
  return state_->volume.engine(0).name();
}

bool SwapSpace::direct() const noexcept {
  return state_->volume.direct();
}

std::vector<std::string> SwapSpace::paths() const {
  std::vector<std::string> paths;
  for (const SwapFile& file : state_->volume.files()) paths.push_back(file.path());
  return paths;
}

SwapSpace::Stats SwapSpace::stats() const {
  const VolumeCounters& counters = state_->volume.counters();
  return {.space = state_->allocator->stats(),
          .bytes_read = counters.bytes_read,
          .bytes_written = counters.bytes_written,
          .device_bytes_read = counters.device_bytes_read,
          .device_bytes_written = counters.device_bytes_written,
          .requests = counters.requests,
          .short_transfers = counters.short_transfers,
          .bounced_bytes = counters.bounced_bytes,
          .modified_blocks = counters.modified_blocks,
          .checksum_errors = counters.checksum_errors,
          .errors = counters.errors,
          .bounce_bytes = state_->bounce_bytes,
          .sum_bytes = *state_->sum_memory};
}

RegisteredBuffer SwapSpace::register_buffer(std::span<std::byte> memory) {
  check();
  RegisteredBuffer buffer;
  if (memory.empty()) return buffer;
  buffer.space_ = this;
  buffer.memory_ = memory;
  buffer.registered_ = true;
  for (unsigned i = 0; i < state_->volume.engine_count(); ++i) {
    buffer.registered_ = state_->volume.engine(i).add_buffer(memory) && buffer.registered_;
  }
  return buffer;
}

void SwapSpace::unregister(std::span<std::byte> memory) noexcept {
  if (!owner_.here()) return;
  for (unsigned i = 0; i < state_->volume.engine_count(); ++i) {
    state_->volume.engine(i).remove_buffer(memory);
  }
}

RegisteredBuffer::RegisteredBuffer(RegisteredBuffer&& other) noexcept
    : space_(std::exchange(other.space_, nullptr)),
      memory_(std::exchange(other.memory_, {})),
      registered_(std::exchange(other.registered_, false)) {}

RegisteredBuffer& RegisteredBuffer::operator=(RegisteredBuffer&& other) noexcept {
  std::swap(space_, other.space_);
  std::swap(memory_, other.memory_);
  std::swap(registered_, other.registered_);
  return *this;
}

RegisteredBuffer::~RegisteredBuffer() {
  if (space_ != nullptr) space_->unregister(memory_);
}

}  // namespace pagoda::io
