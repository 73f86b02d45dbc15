// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "pagoda/base/thread_pool.h"
#include "pagoda/optim/optimizer.h"
#include "pagoda/optim/state_layout.h"
#include "pagoda/optim/trained_page.h"
#include "pagoda/pager/tiers.h"

namespace pagoda::optim {

/// What a step has fixed for every page that it updates.
struct StepScalars {
  double grad_scale = 1;              // inverse loss scale × clipping factor
  std::vector<Optimizer> optimizers;  // by group
};

/// The elements of the page that a chunk of its state has.
inline pager::Range chunk_elements(const TrainedPage& page, const StateLayout& layout,
                                   std::uint64_t chunk) noexcept {
  const std::uint64_t begin = page.updated.begin + chunk * layout.chunk;
  return {begin, begin + layout.count(page.updated.size(), chunk)};
}

/// One chunk of a page on its way through an update: state, gradient and parameter are read, the
/// rule is applied, state and parameter are written. What lies in memory is used where it is; the
/// rest passes through a buffer. Used again for one chunk after the other, by one thread.
class UpdateChunk {
 public:
  /// Arrays of a chunk in a buffer, four bytes an element each at most: master, two moments,
  /// parameter and gradient.
  static constexpr Bytes kArrays = 5;
  /// Bytes a buffer needs for chunks of that many elements.
  static constexpr Bytes buffer_bytes(std::uint64_t elements) noexcept {
    return elements * kArrays * sizeof(float) + 4 * StateLayout::kAlignment;
  }

  /// Without a buffer, for pages that lie in memory as a whole.
  explicit UpdateChunk(pager::Tiers& tiers, pager::HostBlock buffer = {})
      : tiers_(tiers), buffer_(std::move(buffer)) {}
  UpdateChunk(const UpdateChunk&) = delete;
  UpdateChunk& operator=(const UpdateChunk&) = delete;

  /// Where an update writes, if not to where it reads.
  struct Written {
    bool state_to_spare = false;              // TrainedPage::spare
    const pager::Home* parameters = nullptr;  // of TrainedPage::updated; null: the page's home
  };

  /// Takes up a chunk and starts to read what the update needs. Returns the bytes from disk.
  Bytes begin(const TrainedPage& page, const StateLayout& layout, std::uint64_t chunk,
              const Written& written);
  /// Returns when all that was started has ended. Throws what went wrong.
  void wait();
  /// Whether wait() would return at once.
  bool arrived() const noexcept;
  /// Waits, and forgets what went wrong: the buffer is nobody's afterwards.
  void abandon() noexcept;

  /// A blank state becomes the state before the first update.
  void fill_blank(ThreadPool& pool);
  /// Updates these elements of the page, which ascend.
  void apply(std::span<const pager::Range> wanted, const StepScalars& step, std::uint64_t seed,
             ThreadPool& pool);
  /// Starts to write what was updated. Returns the bytes to disk.
  Bytes write();

  pager::Range elements() const noexcept { return elements_; }

 private:
  /// Bytes of one home: in place, or in the buffer.
  struct Array {
    const pager::Home* home = nullptr;
    Bytes offset = 0;
    std::span<std::byte> memory;
    bool in_buffer = false;
  };

  Array place(const pager::Home& home, Bytes offset, Bytes bytes, std::byte*& free) const;
  Bytes read(const Array& array);
  bool reads_parameter() const noexcept;

  pager::Tiers& tiers_;
  pager::HostBlock buffer_;
  const TrainedPage* page_ = nullptr;
  const StateLayout* layout_ = nullptr;
  pager::Range elements_;
  Array state_;
  Array gradient_;
  Array parameter_;               // as it is read
  Array updated_;                 // …and as it is written
  std::byte* written_ = nullptr;  // where the state goes, if not to where it comes from
  std::vector<io::Transfer> transfers_;
};

/// The parameters that an early update left in `from` go to the page's home; both in memory that
/// the host can reach, or `from` alone.
void copy_parameters(pager::Tiers& tiers, TrainedPage& page, const pager::Home& from,
                     ThreadPool& pool);

/// Masters follow `count` 16-bit parameters from element `begin` of the page on that somebody
/// changed from `before` to `after`. Only where they differ: writing the same bits loses nothing.
void follow_parameters(pager::Tiers& tiers, TrainedPage& page, const StateLayout& layout,
                       std::uint64_t begin, std::uint64_t count, const std::byte* before,
                       const std::byte* after);

}  // namespace pagoda::optim
