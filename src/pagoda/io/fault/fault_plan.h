// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <latch>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>
#include <vector>

#include "pagoda/base/clock.h"
#include "pagoda/base/ranked_mutex.h"
#include "pagoda/io/request.h"

namespace pagoda::io {

enum class FaultKind : std::uint8_t {
  Error,    ///< nothing is transferred; the request ends with an errno
  Short,    ///< only a first part is transferred
  FlipBit,  ///< one bit of what is read, or of what lands on the disk, is wrong; no error
  Delay,    ///< all goes well, later
};
inline constexpr std::size_t kFaultKinds = 4;

/// What shall happen to one request.
struct Fault {
  FaultKind kind = FaultKind::Error;
  int error_number = 5;        ///< EIO; of Error
  Nanos delay = 0;             ///< of Delay: after it would have ended
  Nanos until = 0;             ///< of Delay: not before this, by now_ns()
  std::uint64_t position = 0;  ///< of Short and FlipBit, taken modulo what is possible
  /// Of Delay: not before this is open, nor is any other delayed request of the same engine. It
  /// outlives them.
  std::latch* gate = nullptr;
};

/// Meets requests of `op` (any when empty) that touch [begin, end) of their file: lets the first
/// `skip` of them pass, then strikes `times` times.
struct FaultRule {
  Fault fault;
  std::optional<Op> op = std::nullopt;
  Bytes begin = 0;
  Bytes end = std::numeric_limits<Bytes>::max();
  std::uint64_t skip = 0;
  std::uint64_t times = 1;
};

/// Strikes each request with `probability`, with one of `faults`. Which depends on the seed, the
/// operation, its place and how often that was met before, and not on the order of threads.
struct FaultLottery {
  std::uint64_t seed = 0;
  double probability = 0;
  std::vector<Fault> faults;
};

/// What shall go wrong, and how often it did. All members may be called from any thread.
class FaultPlan {
 public:
  void add(const FaultRule& rule);
  void set_lottery(FaultLottery lottery);
  /// Requests that nothing else strikes are those of a disk that serves one after the other, so
  /// many bytes a second, and end no sooner: a disk that is as quick in an hour as now. 0: as they
  /// are.
  void set_pace(double bytes_per_second);
  /// No more faults, and no pace.
  void clear();

  /// The fault for a request that is about to start; the first rule that strikes wins.
  std::optional<Fault> decide(const Request& request);

  /// How many of a kind were dealt out; the pace is none.
  std::uint64_t injected(FaultKind kind) const;

 private:
  using Place = std::tuple<Op, Bytes, Bytes>;

  std::optional<Fault> strike(const Request& request, const RankedGuard<LockRank::FaultPlan>&);

  mutable RankedMutex<LockRank::FaultPlan> mutex_;
  std::vector<FaultRule> rules_;                       // guarded by mutex_; used up as they strike
  FaultLottery lottery_;                               // guarded by mutex_
  double pace_ = 0;                                    // guarded by mutex_
  Nanos paced_until_ = 0;                              // guarded by mutex_
  std::map<Place, std::uint64_t> met_;                 // guarded by mutex_
  std::array<std::uint64_t, kFaultKinds> injected_{};  // guarded by mutex_
};

}  // namespace pagoda::io
