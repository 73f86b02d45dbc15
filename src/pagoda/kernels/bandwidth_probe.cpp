// SPDX-License-Identifier: Apache-2.0
#include "pagoda/kernels/bandwidth_probe.h"

#include <algorithm>
#include <utility>

#include "pagoda/base/error.h"
#include "pagoda/kernels/dispatch.h"

namespace pagoda::kernels {
namespace {

/// Points `to` at the arrays from element `begin` on and counts them by width.
template <class Arrays, class Pointer>
void place(const Arrays& arrays, std::size_t begin, Pointer* to, int& wide, int& narrow) {
  for (const auto& array : arrays) {
    *to++ = static_cast<Pointer>(array.from(begin).data);
    ++(element_size(array.type) == 4 ? wide : narrow);
  }
}

ProbeJob job_of(const BandwidthProbe::Streams& streams, std::size_t begin, std::size_t end,
                BandwidthProbe::Style style) {
  ProbeJob job;
  place(streams.read, begin, job.read, job.read4, job.read2);
  place(streams.update, begin, job.update, job.update4, job.update2);
  place(streams.write, begin, job.write, job.write4, job.write2);
  job.count = end - begin;
  job.prefetch = style.prefetch;
  job.stream = style.stream;
  return job;
}

}  // namespace

BandwidthProbe::BandwidthProbe(Streams streams) : streams_(std::move(streams)) {
  const auto sort = [](auto& arrays) {
    PAGODA_REQUIRE_LE(arrays.size(), ProbeJob::kMax, "too many streams");
    std::ranges::stable_sort(arrays, std::greater{},
                             [](const auto& array) { return element_size(array.type); });
  };
  sort(streams_.read);
  sort(streams_.update);
  sort(streams_.write);
  run(0, 0, {false, false});  // throws where there is no loop for them
}

void BandwidthProbe::run(std::size_t begin, std::size_t end, Style style, Isa isa) const {
  PAGODA_REQUIRE(begin % 32 == 0 && end % 32 == 0, "a probe moves groups of 32 elements");
  PAGODA_REQUIRE(kernels_for(isa).probe(job_of(streams_, begin, end, style)),
                 "no kernel has these streams");
}

}  // namespace pagoda::kernels
