// SPDX-License-Identifier: Apache-2.0
// When a saved tensor's storage leaves the device, and what happens when the disk fails. What
// backward reads is compared with plain autograd in tests/python/test_saved_tensors.py.
#include "pagoda/torch/activation_store.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <thread>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/from_blob.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/comm/solo_world.h"
#include "pagoda/device/emulated/emulated_device.h"
#include "pagoda/io/fault/fault_plan.h"
#include "pagoda/torch/engine.h"
#include "unit/io/scratch_directory.h"

namespace pagoda::torch {
namespace {

using pager::Placement;
using pager::Tier;
using ::testing::HasSubstr;

class ActivationStoreTest : public ::testing::Test {
 protected:
  static Config config(const std::string& directory, std::shared_ptr<io::FaultPlan> faults) {
    Config config;
    config.device = "cpu";
    config.device_budget = 2_MiB;
    config.gradient_staging = 1_MiB;
    config.host_budget = 16_MiB;
    config.nvme_budget = 4_MiB;
    config.staging = config.update_chunk = 64_KiB;
    config.fetch_threads = config.update_threads = 1;
    config.nvme = {directory};
    config.faults = std::move(faults);
    return config;
  }

  static at::Tensor some(std::int64_t count = 1 << 14) { return at::arange(count, at::kFloat); }
  Bytes held(Tier tier = Tier::Host) {
    store_->flush();
    return engine_.stats().held(tier, "activations");
  }
  ActivationStore::Saved pack(const at::Tensor& tensor, Placement placement = Placement::Host) {
    return store_->pack(tensor, {.placement = placement, .least = 1, .in_flight = 1_MiB});
  }

  const io::ScratchDirectory scratch_;
  const std::shared_ptr<io::FaultPlan> faults_ = std::make_shared<io::FaultPlan>();
  int warnings_ = 0;
  const log::Capture capture_{[this](log::Level level, const auto&) {
    if (level == log::Level::Warn) ++warnings_;
  }};
  Engine engine_{config(scratch_.path().string(), faults_), comm::make_solo_world()};
  const std::shared_ptr<ActivationStore> store_ = engine_.activations();
};

TEST_F(ActivationStoreTest, AStorageLeavesWithItsLastReferenceAndOnce) {
  at::Tensor tensor = some();
  const Bytes bytes = tensor.nbytes();
  at::Tensor alias = tensor.slice(0, 5, 9);
  const auto first = pack(tensor), second = pack(tensor.slice(0, 8)), third = pack(alias);
  tensor.reset();
  EXPECT_EQ(held(), 0U);
  alias.reset();
  EXPECT_EQ(held(), bytes);
  EXPECT_TRUE(at::equal(store_->unpack(first), some()));
  EXPECT_TRUE(at::equal(store_->unpack(second), some().slice(0, 8)));
  EXPECT_TRUE(at::equal(store_->unpack(third), some().slice(0, 5, 9)));
}

TEST_F(ActivationStoreTest, AWeakReferenceHoldsAStorage) {
  at::Tensor tensor = some();
  auto weak = tensor.storage().getWeakStorageImpl();
  const auto saved = pack(tensor);
  tensor.reset();
  EXPECT_EQ(held(), 0U);
  {
    c10::Storage again(weak.lock());  // writes, as nobody can who has none
    static_cast<float*>(again.mutable_data())[3] = -1;
  }
  weak.reset();
  EXPECT_GT(held(), 0U);
  EXPECT_EQ(store_->unpack(saved)[3].item<float>(), -1);
}

TEST_F(ActivationStoreTest, MemoryOfOthersStays) {
  std::vector<float> memory(1 << 14, 1.0F);
  const auto saved = pack(at::from_blob(memory.data(), {1 << 14}));
  EXPECT_EQ(held(), 0U);
  memory[7] = 2;
  EXPECT_EQ(store_->unpack(saved)[7].item<float>(), 2);
}

TEST_F(ActivationStoreTest, ALittleOfSomethingLargeStays) {
  const auto saved = pack(some().slice(0, 0, 16));
  EXPECT_EQ(held(), 0U);
  const auto parts = some().chunk(8);
  std::vector<ActivationStore::Saved> all;
  for (const at::Tensor& part : some().chunk(8)) all.push_back(pack(part));
  EXPECT_GT(held(), 0U) << "together they are all of it";
  for (std::size_t i = 0; i < all.size(); ++i) {
    EXPECT_TRUE(at::equal(store_->unpack(all[i]), parts[i]));
  }
}

TEST_F(ActivationStoreTest, WhatIsAskedForWhileItLeavesStays) {
  const auto saved = pack(some());
  store_->pause(true);
  store_->sweep();
  at::Tensor back = store_->unpack(saved);
  back.fill_(5);  // after that, a copy of what it was is worth nothing
  store_->pause(false);
  back.reset();
  store_->flush();
  EXPECT_TRUE(at::equal(store_->unpack(saved), at::full({1 << 14}, 5.0F)));
}

TEST_F(ActivationStoreTest, RestoredStoragesLeaveAgainIfTheyAreTooMany) {
  std::vector<ActivationStore::Saved> saved;
  for (int i = 0; i < 64; ++i) saved.push_back(pack(some() + i));  // 4 MiB
  EXPECT_EQ(held(), 64 * (1U << 16));
  for (int pass = 0; pass < 3; ++pass) {
    for (int i = 63; i >= 0; --i) {
      at::Tensor back = store_->unpack(saved[static_cast<std::size_t>(i)]);
      ASSERT_TRUE(at::equal(back, some() + i + pass)) << "pass " << pass << ", " << i;
      back += 1;  // behind autograd's back: the next pass reads it
    }
  }
}

TEST_F(ActivationStoreTest, AFailedWriteLosesNothing) {
  faults_->add({.fault = {.kind = io::FaultKind::Error, .error_number = EIO}, .op = io::Op::Write});
  const auto saved = pack(some(), Placement::Nvme);
  store_->flush();
  EXPECT_EQ(warnings_, 1);
  EXPECT_TRUE(at::equal(store_->unpack(saved), some()));
  const auto next = pack(some() + 1, Placement::Nvme);
  EXPECT_GE(held(Tier::Nvme), some().nbytes());
  EXPECT_TRUE(at::equal(store_->unpack(next), some() + 1));
}

TEST_F(ActivationStoreTest, AFailedReadIsThrownAndMayBeTriedAgain) {
  const auto saved = pack(some(), Placement::Nvme);
  store_->flush();
  faults_->add({.fault = {.kind = io::FaultKind::Error, .error_number = EIO}, .op = io::Op::Read});
  try {
    (void)store_->unpack(saved);
    FAIL() << "the disk failed";
  } catch (const EngineError& error) {
    EXPECT_THAT(error.what(), HasSubstr("EIO"));
  }
  EXPECT_TRUE(at::equal(store_->unpack(saved), some()));
}

TEST_F(ActivationStoreTest, WhatIsFullIsSaidOnceAndStays) {
  std::vector<ActivationStore::Saved> saved;
  for (int i = 0; i < 40; ++i) saved.push_back(pack(some(1 << 16) + i, Placement::Nvme));
  store_->flush();
  EXPECT_EQ(warnings_, 1);
  EXPECT_GT(held(Tier::Nvme), 2_MiB);
  for (int i = 39; i >= 0; --i) {
    ASSERT_TRUE(at::equal(store_->unpack(saved[static_cast<std::size_t>(i)]), some(1 << 16) + i));
  }
}

TEST_F(ActivationStoreTest, NothingIsLeftOfWhatNobodyNeeds) {
  for (int i = 0; i < 10; ++i) (void)pack(some());
  auto saved = pack(some());
  const auto again = pack(store_->unpack(saved));
  saved = {};
  EXPECT_TRUE(at::equal(store_->unpack(again), some()));
  while (held() != some().nbytes()) std::this_thread::yield();  // copies end on their own
}

TEST_F(ActivationStoreTest, AnyThreadMayCallIt) {
  std::vector<std::thread> threads;
  at::Tensor shared = some();
  std::atomic<int> wrong = 0;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (int round = 0; round < 50; ++round) {
        std::vector<ActivationStore::Saved> saved;
        for (int i = 0; i < 8; ++i) {
          saved.push_back(pack(some(1 << 10) + i, i % 2 == 0 ? Placement::Host : Placement::Nvme));
          saved.push_back(pack(shared));
        }
        if (round % 3 == thread % 3) store_->sweep();
        for (int i = 7; i >= 0; --i) {
          const auto at = static_cast<std::size_t>(2 * i);
          if (!at::equal(store_->unpack(saved[at]), some(1 << 10) + i)) ++wrong;
          if (!at::equal(store_->unpack(saved[at + 1]), shared)) ++wrong;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

/// A device with streams, whose memory torch's CPU tensors stand for.
class ActivationStoreStreams : public ::testing::TestWithParam<Placement> {
 protected:
  static pager::Tiers::Options options(const std::shared_ptr<device::Device>& device,
                                       const std::string& directory) {
    pager::Tiers::Options options;
    options.device = device;
    options.device_budget = 1_MiB;
    options.host_budget = 64_MiB;
    options.swap.directories = {directory};
    options.swap.capacity = 32_MiB;
    return options;
  }

  ActivationStore::Saved pack(const at::Tensor& tensor) {
    return store_->pack(tensor, {.placement = GetParam(), .least = 1, .in_flight = 1_MiB});
  }
  /// A kernel that takes its time and then sets the tensor's bytes; it holds no reference.
  static void fill_later(device::Stream& stream, const at::Tensor& tensor, float value) {
    device::emulated::run_for(stream, 20'000'000, "work");
    auto* data = static_cast<float*>(tensor.mutable_data_ptr());
    stream.enqueue("fill",
                   [data, value, count = tensor.numel()] { std::fill_n(data, count, value); });
  }

  const io::ScratchDirectory scratch_;
  const std::shared_ptr<device::Device> device_ = device::emulated::make_device();
  pager::Tiers tiers_{options(device_, scratch_.path().string())};
  const std::shared_ptr<device::Stream> one_ = device_->make_stream({"one"});
  const std::shared_ptr<device::Stream> two_ = device_->make_stream({"two"});
  std::shared_ptr<device::Stream> current_ = one_;
  ThreadPool pool_{1, "activations"};
  const std::shared_ptr<ActivationStore> store_ = std::make_shared<ActivationStore>(
      tiers_, pool_, c10::Device(c10::kCPU), [this] { return current_; });
};

TEST_P(ActivationStoreStreams, WhatWasQueuedBeforeItLeftIsInTheCopy) {
  at::Tensor tensor = at::zeros({1 << 20});
  const auto saved = pack(tensor);
  fill_later(*one_, tensor, 3);
  tensor.reset();
  store_->flush();
  EXPECT_TRUE(at::equal(store_->unpack(saved), at::full({1 << 20}, 3.0F)));
}

TEST_P(ActivationStoreStreams, OnWhicheverStreamItWasSaved) {
  at::Tensor tensor = at::zeros({1 << 14});
  const auto first = pack(tensor);
  current_ = two_;
  const auto second = pack(tensor);
  fill_later(*one_, tensor, 4);
  current_ = device_->make_stream({"three"});
  tensor.reset();
  store_->flush();
  EXPECT_TRUE(at::equal(store_->unpack(first), at::full({1 << 14}, 4.0F)));
  EXPECT_TRUE(at::equal(store_->unpack(second), at::full({1 << 14}, 4.0F)));
}

TEST_P(ActivationStoreStreams, LargeOnesGoInPieces) {
  std::vector<ActivationStore::Saved> saved;
  const std::int64_t count = (5 << 20) / 2 + 12345;  // more than one staging buffer, and a rest
  for (int i = 0; i < 2; ++i) saved.push_back(pack(at::arange(count, at::kFloat) + i));
  store_->flush();
  for (int i = 1; i >= 0; --i) {
    EXPECT_TRUE(at::equal(store_->unpack(saved[static_cast<std::size_t>(i)]),
                          at::arange(count, at::kFloat) + i));
  }
}

INSTANTIATE_TEST_SUITE_P(Placements, ActivationStoreStreams,
                         ::testing::Values(Placement::Host, Placement::Nvme), [](const auto& one) {
                           return one.param == Placement::Host ? "Host" : "Nvme";
                         });

}  // namespace
}  // namespace pagoda::torch
