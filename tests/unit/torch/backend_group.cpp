// SPDX-License-Identifier: Apache-2.0
// A group over a c10d backend. NCCL needs a GPU for each rank: what stands in for it here batches
// sends and receives as NCCL does, and moves them between threads.
#include "pagoda/torch/backend_group.h"

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "pagoda/base/error.h"
#include "pagoda/comm/thread_world.h"
#include "unit/comm/world_case.h"

namespace pagoda::comm {
namespace {

class Done final : public ::c10d::Work {
 public:
  bool wait(std::chrono::milliseconds /*timeout*/) override { return true; }
};

class Batches final : public ::c10d::Backend {
 public:
  explicit Batches(std::unique_ptr<Group> group)
      : Backend(group->rank(), group->size()), group_(std::move(group)) {}

  const std::string getBackendName() const override { return "batches"; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { batch_.clear(); }
  c10::intrusive_ptr<::c10d::Work> endCoalescing() override {
    group_->exchange(batch_);
    return c10::make_intrusive<Done>();
  }
  c10::intrusive_ptr<::c10d::Work> send(std::vector<at::Tensor>& tensors, int peer,
                                        int /*tag*/) override {
    batch_.push_back(send_to(peer, 0, bytes_of(tensors[0])));
    return nullptr;
  }
  c10::intrusive_ptr<::c10d::Work> recv(std::vector<at::Tensor>& tensors, int peer,
                                        int /*tag*/) override {
    batch_.push_back(receive_from(peer, 0, bytes_of(tensors[0])));
    return nullptr;
  }
  void abort() override { group_->abort("stopped"); }

 private:
  static std::span<std::byte> bytes_of(const at::Tensor& tensor) {
    return {static_cast<std::byte*>(tensor.mutable_data_ptr()),
            static_cast<std::size_t>(tensor.numel())};
  }
  const std::unique_ptr<Group> group_;
  std::vector<Transfer> batch_;
};

std::vector<std::unique_ptr<Group>> backend_groups(int ranks) {
  const auto worlds = make_thread_worlds(ranks);
  std::vector<std::unique_ptr<Group>> groups(worlds.size());
  on_ranks(ranks, [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    groups[r] = torch::make_backend_group(
        c10::make_intrusive<Batches>(worlds[r]->make_group("below")), "gradients", c10::kCPU);
  });
  return groups;
}

TEST(BackendGroup, GivesEveryoneTheirPart) {
  for (const int ranks : {1, 2, 3, 4}) {
    const auto groups = backend_groups(ranks);
    on_ranks(ranks, [&](int rank) {
      Group& group = *groups[static_cast<std::size_t>(rank)];
      EXPECT_EQ(group.rank(), rank);
      for (const std::size_t unit : {std::size_t{7}, std::size_t{100'000}, std::size_t{1}}) {
        // Rank a sends b + 1 units of the byte 16 a + b to rank b.
        std::vector<std::vector<std::byte>> out, in;
        std::vector<std::span<const std::byte>> to;
        std::vector<std::span<std::byte>> from;
        for (int peer = 0; peer < ranks; ++peer) {
          out.emplace_back(unit * static_cast<std::size_t>(peer + 1), std::byte(16 * rank + peer));
          in.emplace_back(unit * static_cast<std::size_t>(rank + 1));
        }
        for (const auto& part : out) to.emplace_back(part);
        for (auto& part : in) from.emplace_back(part);
        group.all_to_all(to, from);
        for (int peer = 0; peer < ranks; ++peer) {
          const auto& part = in[static_cast<std::size_t>(peer)];
          EXPECT_EQ(part, std::vector(part.size(), std::byte(16 * peer + rank)));
        }
      }
      std::array<std::uint64_t, 2> most = {static_cast<std::uint64_t>(rank), 5};
      group.all_reduce_max(most);
      EXPECT_EQ(most[0], static_cast<std::uint64_t>(ranks - 1));
      EXPECT_EQ(most[1], 5U);
      group.barrier();
    });
  }
}

TEST(BackendGroup, ThatIsAbortedWakesWhoWaits) {
  const auto groups = backend_groups(2);
  std::jthread aborts([&] { groups[0]->abort("the other rank is lost"); });
  std::uint64_t mine = 1;
  EXPECT_THROW(groups[0]->all_reduce_max({&mine, 1}), GroupAborted);
}

TEST(BackendGroup, SaysWhatItCannotDo) {
  const auto groups = backend_groups(2);
  std::array<std::byte, 4> data{};
  EXPECT_THROW((void)groups[0]->recv_any(1, data), EngineError);
}

}  // namespace
}  // namespace pagoda::comm
