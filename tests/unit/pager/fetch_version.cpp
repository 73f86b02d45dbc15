// SPDX-License-Identifier: Apache-2.0
// What a fetch asks other ranks for.
#include <latch>
#include <map>
#include <thread>

#include <gtest/gtest.h>

#include "pagoda/device/host/host_device.h"
#include "pagoda/pager/pager.h"
#include "unit/pager/plain_binding.h"
#include "unit/pager/wants_pages.h"

namespace pagoda::pager {
namespace {

/// Other ranks, who take their time with the first pull.
class SlowRanks final : public RemoteShards {
 public:
  void pull(PageId page, std::uint64_t version, std::span<const Piece> /*pieces*/) override {
    const bool first = versions_.empty();  // there is one fetch thread
    versions_[page] = version;
    if (!first) return;
    asked.count_down();
    answer.wait();
  }
  std::uint64_t version_asked(const Page& page) const { return versions_.at(page.id); }

  std::latch asked{1};
  std::latch answer{1};

 private:
  std::map<PageId, std::uint64_t> versions_;
};

// Other ranks make the next version when their steps are through with fetches of the one before: if
// such a fetch asked for it, all would wait for one another.
TEST(Pager, AFetchAsksForTheVersionThatItWasStartedWith) {
  constexpr Bytes kBytes = 32_KiB;  // elements enough for two shards
  Tiers::Options options;
  options.device = device::host::make_device({});
  options.device_budget = 8 * kBytes;
  options.host_budget = 16_MiB;
  Tiers tiers(options);
  PlainBinding bindings[3];
  Pager::Options two_ranks;
  two_ranks.sharding.ranks = 2;
  two_ranks.fetch_threads = 1;
  SlowRanks others;
  WantsPages foresight;
  Pager pager(tiers, two_ranks);
  pager.set_remote(&others);
  pager.set_foresight(&foresight);
  const auto add = [&](const char* name, PlainBinding& binding) -> Page& {
    const std::vector<std::byte> contents(kBytes);
    Page& page = pager.adopt(name, kBytes / 2, 2, Placement::Host, contents.data(),
                             device::Direction::HostToHost);
    pager.set_binding(page, &binding);
    return page;
  };
  Page& fetched = add("fetched", bindings[0]);
  Page& queued = add("queued", bindings[1]);
  Page& touched = add("touched", bindings[2]);
  for (Page* page : {&fetched, &queued}) {
    pager.set_home_range(*page, pager.shard_of(*page), Placement::Host);
  }
  const Access access{&touched, false};
  foresight.want({fetched.id, queued.id});
  Pin pin = pager.touch({&access, 1}, 0, nullptr);
  pin.release();
  others.asked.wait();
  std::jthread step([&] {
    Page* const pending = &queued;
    pager.mark_pending({&pending, 1});
  });
  for (bool pending = false; !pending; std::this_thread::yield()) {
    const PageSnapshot now = pager.look(queued);
    pending = now.version < now.wanted;
  }
  others.answer.count_down();
  step.join();
  EXPECT_EQ(others.version_asked(queued), 0U);
  pager.set_foresight(nullptr);
}

}  // namespace
}  // namespace pagoda::pager
