// SPDX-License-Identifier: Apache-2.0
#include "pagoda/optim/updater.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <latch>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pagoda/comm/comm_error.h"
#include "pagoda/comm/pull_service.h"
#include "pagoda/comm/thread_world.h"
#include "pagoda/device/host/host_device.h"
#include "pagoda/engine/shard_exchange.h"
#include "unit/io/scratch_directory.h"

namespace pagoda::optim {
namespace {

using kernels::Dtype;
using testing::ElementsAre;

/// An updater by itself, with pages of bf16 ones and gradients of bf16 halves in host memory, and
/// their states there or on disk.
class UpdaterAlone : public testing::Test {
 protected:
  static constexpr std::uint64_t kChunk = 8192;

  explicit UpdaterAlone(std::uint64_t chunk = 4096, Dtype moments = Dtype::F32,
                        StateLayout::Master master = StateLayout::Master::Whole) {
    pager::Tiers::Options options;
    options.device = device::host::make_device({});
    options.device_budget = 1_MiB;
    options.host_budget = 256_MiB;
    options.swap.directories = {directory_.path()};
    options.swap.capacity = 64_MiB;
    tiers_ = std::make_unique<pager::Tiers>(options);
    pager_ = std::make_unique<pager::Pager>(*tiers_, pager::Pager::Options{});
    Updater::Options updates;
    updates.master16 = master;
    updates.moments = moments;
    updates.chunk = chunk;
    updates.chunk_in_memory = kChunk;
    updater_ = std::make_unique<Updater>(*pager_, pool_, updates);
    updater_->set_callbacks(
        [this](TrainedPage& page, std::uint64_t) {
          const std::lock_guard lock(mutex_);
          order_.push_back(page.number);
          return true;
        },
        {});
    pager_->set_pending_updates(updater_.get());
  }
  ~UpdaterAlone() override {
    updater_->stop();
    pager_->set_pending_updates(nullptr);
  }

  TrainedPage& page(std::uint64_t elements, pager::Placement states = pager::Placement::Host) {
    const std::vector<std::uint16_t> ones(elements, 0x3F80);
    const std::vector<std::uint16_t> halves(elements, 0x3F00);
    auto page = std::make_unique<TrainedPage>();
    page->number = static_cast<std::uint32_t>(pages_.size());
    page->page =
        &pager_->adopt(fmt::format("page {}", page->number), elements, 2, pager::Placement::Host,
                       std::as_bytes(std::span(ones)).data(), device::Direction::HostToHost);
    page->dtype = page->gradient_dtype = Dtype::BF16;
    page->segments = {{{0, elements}, 0, 0}};
    page->parameters = {{.index = page->number, .used = true}};
    page->reduced = page->updated = page->gradient_range = {0, elements};
    page->gradient = tiers_->allocate(page->gradient_bytes(), pager::Placement::Host,
                                      pager::tag::kGradients, "gradient");
    tiers_->write(page->gradient, 0, std::as_bytes(std::span(halves)));
    page->state = tiers_->allocate(updater_->layout(*page, rule_).bytes(elements), states,
                                   pager::tag::kOptimizer, "state");
    updater_->add(*page, rule_);
    pages_.push_back(std::move(page));
    return *pages_.back();
  }
  /// One whose early updates can be rolled back.
  TrainedPage& reversible_page(std::uint64_t elements) {
    TrainedPage& out = page(elements);
    const auto bytes = updater_->early_bytes(out, true).value();
    const auto allocate = [&](Bytes count) {
      return tiers_->allocate(count, pager::Placement::Host, pager::tag::kEarly, "early");
    };
    out.spare = allocate(bytes.spare);
    out.next = allocate(bytes.next);
    return out;
  }

  std::vector<std::uint16_t> values(const TrainedPage& page) {
    std::vector<std::uint16_t> out(page.elements());
    tiers_->read(page.home(), 0, std::as_writable_bytes(std::span(out)));
    return out;
  }

  /// The pages have a gradient and a pending update.
  void mark_pending(const std::vector<TrainedPage*>& pages) {
    for (TrainedPage* page : pages) {
      page->parameters[0].used = page->parameters[0].filled = true;
      pager_->mark_pending({&page->page, 1});
    }
  }
  /// As step() does: …which is queued.
  void start(const std::vector<TrainedPage*>& pages) {
    mark_pending(pages);
    updater_->start(pages, scalars_);
  }
  /// As the gradients' thread does before step().
  void start_early(const std::vector<TrainedPage*>& pages, bool reversible) {
    for (TrainedPage* page : pages) {
      page->parameters[0].used = page->parameters[0].filled = true;
      ASSERT_TRUE(updater_->may_start_early(*page, reversible));
      ASSERT_TRUE(pager_->supersede(*page->page));
      updater_->start_early(*page, scalars_, reversible);
    }
  }
  /// As step() does then.
  void release(const std::vector<TrainedPage*>& pages) {
    for (TrainedPage* page : pages) pager_->mark_pending({&page->page, 1});
    updater_->release(pages);
    for (TrainedPage* page : pages) pager_->end_supersede(*page->page);
  }
  /// As step() does when it clips: others are made.
  void start_again(const std::vector<TrainedPage*>& pages, double factor) {
    updater_->roll_back(pages);
    mark_pending(pages);
    updater_->start(pages, std::make_shared<const StepScalars>(StepScalars{factor, {rule_}}));
  }

  /// Keeps the updater busy with a page of its own until let_go(). `others` is told of every other
  /// page whose update is made from now on.
  class Busy {
   public:
    explicit Busy(UpdaterAlone& test, std::function<void(const TrainedPage&)> others = {}) {
      TrainedPage& own = test.page(100);
      test.updater_->set_callbacks(
          [this, &own, others = std::move(others)](TrainedPage& page, std::uint64_t) {
            if (&page == &own) {
              held_.count_down();
              go_.wait();
            } else if (others) {
              others(page);
            }
            return true;
          },
          {});
      test.start({&own});
      held_.wait();
    }
    void let_go() { go_.count_down(); }

   private:
    std::latch held_{1};
    std::latch go_{1};
  };

  /// The numbers of the pages whose updates are made while `work` runs and after it, in their
  /// order. The updater is kept busy with another page meanwhile.
  template <class Work>
  std::vector<std::uint32_t> order_of(const Work& work) {
    Busy busy(*this, [this](const TrainedPage& page) {
      const std::lock_guard lock(mutex_);
      order_.push_back(page.number);
    });
    work();
    busy.let_go();
    updater_->wait_for_all();
    const std::lock_guard lock(mutex_);
    return std::exchange(order_, {});
  }

  const io::ScratchDirectory directory_;
  ThreadPool pool_{2, "update"};
  const Optimizer rule_ = AdamW{.lr = 0.1};
  const std::shared_ptr<const StepScalars> scalars_ =
      std::make_shared<const StepScalars>(StepScalars{1, {rule_}});
  std::unique_ptr<pager::Tiers> tiers_;
  std::unique_ptr<pager::Pager> pager_;
  std::vector<std::unique_ptr<TrainedPage>> pages_;
  std::unique_ptr<Updater> updater_;
  std::mutex mutex_;
  std::vector<std::uint32_t> order_;  // guarded by mutex_
};

TEST_F(UpdaterAlone, MakesUpdatesAsTheyComeAtFirst) {
  TrainedPage& a = page(100);
  TrainedPage& b = page(100);
  TrainedPage& c = page(100);
  EXPECT_THAT(order_of([&] { start({&c, &a, &b}); }), ElementsAre(2, 0, 1));
}

TEST_F(UpdaterAlone, FollowsTheOrderWithWhatWaitsAndWithWhatComesLater) {
  TrainedPage& a = page(100);
  TrainedPage& b = page(100);
  TrainedPage& c = page(100);
  TrainedPage& d = page(100);
  EXPECT_THAT(order_of([&] {
                start({&d, &b, &a});
                updater_->follow(std::vector{&a, &b, &c});
              }),
              ElementsAre(0, 1, 3));
  // The next backward: gradients come from the last layer on, and what the next forward needs first
  // does not wait for the rest.
  EXPECT_THAT(order_of([&] {
                start({&d});
                start({&c});
                start({&b});
                start({&a});
              }),
              ElementsAre(0, 1, 2, 3));
}

TEST_F(UpdaterAlone, MakesPartsFirstAndTheRestOnce) {
  constexpr std::uint64_t kElements = 5 * kChunk + 100;
  TrainedPage& parted = page(kElements);
  TrainedPage& whole = page(kElements);
  const std::vector<pager::Range> parts = {
      {0, 1}, {3, kChunk + 7}, {2 * kChunk, 2 * kChunk + 64}, {5 * kChunk + 99, kElements}};
  EXPECT_TRUE(updater_->can_wait_for_rows(*parted.page, 0));
  EXPECT_FALSE(updater_->can_wait_for_rows(*parted.page, 1)) << "nobody has begun that one";
  // Masters are made with the first update: parts of it are all of it.
  start({&parted, &whole});
  updater_->wait_for_rows(*parted.page, parts);
  updater_->wait_for_all();
  ASSERT_EQ(values(parted), values(whole));
  const std::vector<std::uint16_t> before = values(parted);

  Busy busy(*this);
  start({&whole, &parted});
  std::vector<std::uint16_t> seen(kElements);  // of the parts; the rest may be under way
  std::thread reader([&] {
    updater_->wait_for_rows(*parted.page, parts);
    for (const pager::Range& part : parts) {
      tiers_->read(parted.home(), part.begin * 2,
                   std::as_writable_bytes(std::span(seen).subspan(part.begin, part.size())));
    }
  });
  busy.let_go();
  reader.join();
  updater_->wait_for_all();
  const std::vector<std::uint16_t> after = values(whole);
  EXPECT_EQ(values(parted), after);
  EXPECT_NE(after[0], before[0]);
  for (const pager::Range& part : parts) {
    for (std::uint64_t i = part.begin; i < part.end; ++i) ASSERT_EQ(seen[i], after[i]) << i;
  }
}

// Several threads look rows up, some of them just when the page's last chunk has been computed:
// whatever they meet, nothing is updated twice.
TEST_F(UpdaterAlone, MakesPartsOnceWhoeverAsksAndWhenever) {
  constexpr std::uint64_t kElements = 700;
  constexpr int kSteps = 1500;
  TrainedPage& parted = page(kElements);
  TrainedPage& whole = page(kElements);
  std::atomic<bool> over = false;
  std::vector<std::jthread> readers;
  for (std::uint64_t reader = 0; reader < 3; ++reader) {
    readers.emplace_back([&, reader] {
      const std::vector<pager::Range> rows = {{reader * 100, reader * 100 + 250}};
      while (!over) updater_->wait_for_rows(*parted.page, rows);
    });
  }
  for (int step = 0; step < kSteps; ++step) {
    start({&parted, &whole});
    updater_->wait_for_all();
    if (values(parted) != values(whole)) {
      ADD_FAILURE() << "step " << step;
      break;
    }
  }
  over = true;
}

/// Early updates, beside those that wait for their step.
class EarlyUpdatesOf : public testing::WithParamInterface<StateLayout::Master>,
                       public UpdaterAlone {
 protected:
  EarlyUpdatesOf() : UpdaterAlone(4096, Dtype::F32, GetParam()) {}

  /// One step that clips; `after`: what has been updated of the pages when it does.
  void clipped_step(const std::vector<TrainedPage*>& pages, const std::function<void()>& after) {
    start_early(pages, true);
    after();
    start_again(pages, 0.25);
    updater_->wait_for_all();
  }
  /// A page after steps with these factors.
  std::vector<std::uint16_t> expected(std::uint64_t elements, const std::vector<double>& factors) {
    TrainedPage& plain = page(elements);
    for (const double factor : factors) {
      mark_pending({&plain});
      TrainedPage* const one = &plain;
      updater_->start({&one, 1}, std::make_shared<const StepScalars>(StepScalars{factor, {rule_}}));
      updater_->wait_for_all();
    }
    return values(plain);
  }
  /// Waits until so many of `elements`, from a count of before on, have been updated.
  std::uint64_t wait_for_elements(std::uint64_t before, std::uint64_t enough) {
    std::uint64_t made = 0;
    while ((made = updater_->stats().elements - before) < enough) std::this_thread::yield();
    return made;
  }
};

// In the queue, in the middle, or computed: home has the parameters of before until step().
TEST_P(EarlyUpdatesOf, AreNotSeenBeforeTheirStep) {
  const std::vector<std::uint16_t> once = expected(1, {1.0});
  const std::vector<std::uint16_t> twice = expected(1, {1.0, 1.0});
  for (unsigned round = 0; round < 12; ++round) {
    const std::uint64_t elements = 40 * kChunk + 100;
    const bool reversible = round % 3 == 2;
    TrainedPage& early = reversible ? reversible_page(elements) : page(elements);
    start({&early});
    updater_->wait_for_all();
    const std::uint64_t before = updater_->stats().elements;
    start_early({&early}, reversible);
    wait_for_elements(before, elements * (round / 3) / 3);
    EXPECT_TRUE(updater_->early(early));
    ASSERT_THAT(values(early), testing::Each(once[0])) << "round " << round;
    ASSERT_EQ(early.parameters[0].updates, 1U);
    release({&early});
    updater_->wait_for_all();
    ASSERT_THAT(values(early), testing::Each(twice[0])) << "round " << round;
    ASSERT_EQ(early.parameters[0].updates, 2U);
    EXPECT_FALSE(updater_->early(early));
    updater_->remove(early);
    pager_->drop(*early.page);
    for (pager::Home* home : {&early.state, &early.spare, &early.next, &early.gradient}) {
      *home = {};
    }
  }
}

// Computed, and to be copied home: rows that an operator asks for before that are made already.
TEST_P(EarlyUpdatesOf, AreNotMadeAgainWhereTheyAreLookedUpBeforeTheyAreCopied) {
  const std::uint16_t twice = expected(1, {1.0, 1.0})[0];
  const std::uint16_t thrice = expected(1, {1.0, 1.0, 1.0})[0];
  TrainedPage& early = page(1000);
  start({&early});
  updater_->wait_for_all();
  const std::vector<std::uint16_t> halves(1000, 0x3F00);
  early.gradient = tiers_->allocate(early.gradient_bytes(), pager::Placement::Device,
                                    pager::tag::kGradients, "gradient");
  const auto set_gradient = [&] {
    tiers_->write(early.gradient, 0, std::as_bytes(std::span(halves)));
  };
  set_gradient();
  start_early({&early}, false);
  updater_->wait_for_all();
  Busy busy(*this);
  release({&early});
  std::thread reader([&] {
    const std::vector<pager::Range> rows = {{0, 10}, {500, 700}};
    const auto* seen =
        reinterpret_cast<const std::uint16_t*>(updater_->wait_for_rows(*early.page, rows));
    EXPECT_EQ(seen[0], twice);
    EXPECT_EQ(seen[699], twice);
  });
  busy.let_go();
  reader.join();
  updater_->wait_for_all();
  EXPECT_THAT(values(early), testing::Each(twice));
  set_gradient();
  start({&early});
  updater_->wait_for_all();
  EXPECT_THAT(values(early), testing::Each(thrice));  // so its state is right, too
}

TEST_P(EarlyUpdatesOf, LeaveNothingBehindWhenRolledBack) {
  const std::uint16_t right = expected(1, {1.0, 1.0, 0.25, 0.25})[0];
  bool whole = false;
  bool half = false;
  for (unsigned round = 0; round < 54 && !(whole && half && round >= 9); ++round) {
    // Longer ones, until one is caught in the middle on a busy machine.
    const std::uint64_t elements = (40ULL << (round / 9)) * kChunk + 100;
    TrainedPage& page = reversible_page(elements);
    start({&page});
    updater_->wait_for_all();
    start_early({&page}, true);  // one that stays, so that state and spare have changed places
    release({&page});
    updater_->wait_for_all();
    clipped_step({&page}, [] {});  // rolled back at once, or nearly
    const std::uint64_t before = updater_->stats().elements;
    std::uint64_t made = 0;
    clipped_step({&page}, [&] { made = wait_for_elements(before, elements * (round % 9) / 8); });
    whole = whole || made == elements;
    half = half || (made > 0 && made < elements);
    ASSERT_THAT(values(page), testing::Each(right)) << "round " << round;
    ASSERT_EQ(page.parameters[0].updates, 4U);
    updater_->remove(page);
    pager_->drop(*page.page);
    for (pager::Home* home : {&page.state, &page.spare, &page.next, &page.gradient}) *home = {};
  }
  EXPECT_TRUE(whole && half) << "no update was rolled back as a whole and in the middle";
}

TEST_P(EarlyUpdatesOf, AreNotMadeWhenRolledBackBeforeTheyHaveBegun) {
  TrainedPage& first = page(100);  // not even reversible ones
  TrainedPage& second = reversible_page(100);
  start({&first, &second});
  updater_->wait_for_all();
  const std::vector<std::uint16_t> before = values(first);
  std::uint64_t elements = 0;
  order_of([&] {
    elements = updater_->stats().elements;
    start_early({&first}, false);
    start_early({&second}, true);
    updater_->roll_back(std::vector{&first, &second});
  });
  EXPECT_EQ(updater_->stats().elements, elements);
  EXPECT_EQ(values(first), before);
  EXPECT_FALSE(updater_->early(first));
  EXPECT_EQ(updater_->stats().rolled_back, 2U);
}

INSTANTIATE_TEST_SUITE_P(, EarlyUpdatesOf,
                         testing::Values(StateLayout::Master::Whole, StateLayout::Master::Split),
                         [](const auto& info) {
                           return info.param == StateLayout::Master::Whole ? "WholeMaster"
                                                                           : "SplitMaster";
                         });

// Another rank's prefetch may come when this rank's step has looked for readers, and before its
// update has changed anything.
TEST_F(UpdaterAlone, NobodyIsServedAPageThatIsAboutToBeUpdated) {
  TrainedPage& page = this->page(100);
  const auto worlds = comm::make_thread_worlds(2);
  std::unique_ptr<comm::Group> groups[2];
  {
    std::jthread other([&] { groups[1] = worlds[1]->make_group("pulls"); });
    groups[0] = worlds[0]->make_group("pulls");
  }
  engine::ShardExchange here(std::move(groups[0]), *pager_, *updater_, {});
  pager::Page* const shared = page.page;
  here.share({&shared, 1});
  comm::PullService there(std::move(groups[1]), [](const auto&, auto& reply) { reply.refuse(""); });
  std::vector<std::uint16_t> got(100);
  const auto pull = [&](std::uint64_t version) {
    constexpr std::uint64_t kFirst = 1;  // the number that share() gives the first page
    there.pull(0, kFirst, version, 0, std::as_writable_bytes(std::span(got)));
  };
  pull(0);
  EXPECT_EQ(got, values(page));
  mark_pending({&page});
  EXPECT_THROW(pull(0), comm::RemoteError);
  TrainedPage* const one = &page;
  updater_->start({&one, 1}, scalars_);
  pull(1);
  EXPECT_EQ(got, values(page));
  EXPECT_NE(got[0], 0x3F80);
}

class UpdaterOnDisk : public UpdaterAlone {
 protected:
  UpdaterOnDisk() : UpdaterAlone(128U << 10U) {}
};

// A part of a block is read, changed and written: two ways to the disk, one after the other, for
// each end of a chunk.
TEST_F(UpdaterOnDisk, ReadsAndWritesWholeBlocksWhateverLiesBetweenLargePages) {
  std::vector<TrainedPage*> there;
  std::vector<TrainedPage*> here;
  for (const std::uint64_t elements : {1500U, 1U << 20U, 3000U, 700'001U, 2U << 20U}) {
    there.push_back(&page(elements, pager::Placement::Nvme));
    here.push_back(&page(elements));
  }
  for (int step = 0; step < 3; ++step) {
    start(there);
    start(here);
    updater_->wait_for_all();
  }
  for (std::size_t i = 0; i < there.size(); ++i) EXPECT_EQ(values(*there[i]), values(*here[i]));
  EXPECT_EQ(tiers_->swap()->stats().modified_blocks, 0U);
}

class UpdaterOfShortStates : public UpdaterAlone {
 protected:
  UpdaterOfShortStates() : UpdaterAlone(64U << 10U, Dtype::BF16, StateLayout::Master::Split) {}
};

TEST_F(UpdaterOfShortStates, FillsBuffersWithWhatPassesThroughThem) {
  // A buffer has room for 20 bytes of each of 64 Ki elements, or for 6, as many as these have, of
  // three times as many: 1.125 MiB.
  constexpr std::uint64_t kInBuffer = 192U << 10U;
  TrainedPage& large = page(8 * kInBuffer, pager::Placement::Nvme);
  for (int step = 0; step < 2; ++step) {
    start({&large});
    updater_->wait_for_all();
  }
  const io::SwapSpace::Stats swap = tiers_->swap()->stats();
  EXPECT_EQ(swap.bytes_written, 2 * 6 * 8 * kInBuffer);
  EXPECT_EQ(swap.bytes_read, 6 * 8 * kInBuffer) << "blank state is not read";
  // Requests end with each of the 9 MiB and each of the 8 chunks; there would be 24 chunks.
  EXPECT_EQ(swap.requests, 3U * 16U);
}

}  // namespace
}  // namespace pagoda::optim
