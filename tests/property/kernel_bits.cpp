// SPDX-License-Identifier: Apache-2.0
// The promise: an optimizer step gives the same bits on every instruction set, on any number of
// threads, however the array is cut, wherever states are written, and they are those of a plain
// scalar loop.
#include <algorithm>
#include <functional>
#include <optional>
#include <span>

#include <gtest/gtest.h>

#include "pagoda/base/aligned_buffer.h"
#include "pagoda/kernels/adam.h"
#include "pagoda/kernels/lion.h"
#include "pagoda/kernels/sgd.h"
#include "property/optimizer_state.h"

namespace pagoda {
namespace {

using kernels::Decay;
using kernels::Dtype;
using kernels::Isa;
using kernels::OptimizerShard;
using kernels::Step;

// Long enough for stores past the caches (32768) on some shards, and no multiple of a vector.
constexpr std::size_t kCount = 36000 + 13;
// The upper half of the index changes within the array.
constexpr std::uint64_t kFirstIndex = (std::uint64_t{1} << 32) - 3001;
constexpr std::uint64_t kSeed = 0x1234567887654321;

/// One way to walk over a shard.
struct Walk {
  std::string name;
  std::function<void(const Step&, const OptimizerShard&)> run;
};

/// An optimizer as the test sees it: the kernel on a shard, and the reference on an element.
struct Optimizer {
  std::string name;
  std::function<void(const Step&, const OptimizerShard&, Isa, ThreadPool*)> kernel;
  std::function<void(const Step&, float, float&, float&, float&)> plain;
};

std::vector<Walk> walks(const Optimizer& optimizer, ThreadPool& one, ThreadPool& three) {
  std::vector<Walk> out;
#ifndef __SANITIZE_THREAD__  // one thread has no races: there, those with a pool only
  for (const Isa isa : kernels::supported_isas()) {
    const std::string name(kernels::isa_name(isa));
    out.push_back({name + ", whole", [&optimizer, isa](const Step& step, const OptimizerShard& s) {
                     optimizer.kernel(step, s, isa, nullptr);
                   }});
    out.push_back({name + ", ragged", [&optimizer, isa](const Step& step, const OptimizerShard& s) {
                     std::mt19937 random(7);
                     for (std::size_t begin = 0; begin < s.count;) {
                       const std::size_t piece = 1 + random() % (random() % 8 == 0 ? 9000 : 70);
                       const std::size_t end = std::min(s.count, begin + piece);
                       optimizer.kernel(step, s.part(begin, end), isa, nullptr);
                       begin = end;
                     }
                   }});
  }
#endif
  const Isa best = kernels::best_isa();
  for (ThreadPool* pool : {&one, &three}) {
    out.push_back({fmt::format("{} pool threads", pool->size()),
                   [&optimizer, best, pool](const Step& step, const OptimizerShard& s) {
                     optimizer.kernel(step, s, best, pool);
                   }});
  }
  return out;
}

/// Where a step writes states that it reads elsewhere. Lines start with those of the parameter, so
/// that stores past the caches are possible, or nowhere in particular.
class Elsewhere {
 public:
  Elsewhere(const OptimizerShard& from, bool lined_up) : from_(from) {
    const auto past = reinterpret_cast<std::uintptr_t>(from.param.data) % 64;
    shift_ = lined_up ? past / kernels::element_size(from.param.type) : 5;
    shard = from;
    if (from.param) shard.to.master = place<float>(from.master, master_);
    shard.to.rest = place<std::int16_t>(from.rest, rest_);
    shard.to.momentum = {from.momentum.type, place(from.momentum, momentum_)};
    shard.to.variance = {from.variance.type, place(from.variance, variance_)};
  }

  /// What was written goes to where it would have been without.
  void bring_back() {
    const auto copy = [this](const void* from, void* to, std::size_t size) {
      if (from != nullptr) std::memcpy(to, from, from_.count * size);
    };
    copy(shard.to.master, from_.master, sizeof(float));
    copy(shard.to.rest, from_.rest, sizeof(std::int16_t));
    copy(shard.to.momentum.data, from_.momentum.data, kernels::element_size(from_.momentum.type));
    copy(shard.to.variance.data, from_.variance.data, kernels::element_size(from_.variance.type));
  }

  /// Whether something before or after the arrays was written to.
  bool overran() const {
    return std::ranges::any_of(arrays_, [this](const Array& array) {
      const std::span<const std::byte> all(array.buffer->data(), array.buffer->size());
      const auto touched = [](std::byte b) { return b != kGuard; };
      return std::ranges::any_of(all.first(array.begin), touched) ||
             std::ranges::any_of(all.subspan(array.begin + from_.count * array.size), touched);
    });
  }

  OptimizerShard shard;

 private:
  static constexpr std::byte kGuard{0x5A};
  struct Array {
    const AlignedBuffer* buffer;
    std::size_t begin;
    std::size_t size;  // of an element
  };

  void* place(const void* from, AlignedBuffer& buffer, std::size_t size) {
    if (from == nullptr) return nullptr;
    buffer = AlignedBuffer((from_.count + shift_) * size + 64, 64);
    std::memset(buffer.data(), static_cast<int>(kGuard), buffer.size());
    arrays_.push_back({&buffer, shift_ * size, size});
    return buffer.data() + shift_ * size;
  }
  template <class T>
  T* place(const T* from, AlignedBuffer& buffer) {
    return static_cast<T*>(place(from, buffer, sizeof(T)));
  }
  void* place(const kernels::Elements& from, AlignedBuffer& buffer) {
    return place(from.data, buffer, kernels::element_size(from.type));
  }

  OptimizerShard from_;
  std::size_t shift_ = 0;
  AlignedBuffer master_, rest_, momentum_, variance_;
  std::vector<Array> arrays_;
};

/// A step whose states go elsewhere: nothing but the parameter may have changed where they were.
void step_elsewhere(const Walk& walk, const Step& step, OptimizerState& state, bool lined_up) {
  OptimizerState before = state;
  const OptimizerShard in_place = state.shard(kFirstIndex);
  Elsewhere elsewhere(in_place, lined_up);
  walk.run(step, elsewhere.shard);
  (in_place.param ? before.param : before.master) = in_place.param ? state.param : state.master;
  EXPECT_EQ(state.difference(before), "") << walk.name << ", written elsewhere";
  EXPECT_FALSE(elsewhere.overran()) << walk.name;
  elsewhere.bring_back();
}

/// A step whose parameter goes to where its gradient is, if elements are of one size: the parameter
/// stays as it was, and the gradient's array has the new one.
void step_over_gradient(const Walk& walk, const Step& step, OptimizerState& state) {
  OptimizerShard shard = state.shard(kFirstIndex);
  const kernels::Elements over{shard.grad.type, const_cast<void*>(shard.grad.data)};
  const bool is_master = !shard.param;
  const kernels::Dtype type = is_master ? kernels::Dtype::F32 : shard.param.type;
  if (type != over.type) return walk.run(step, shard);
  std::vector<std::uint8_t>& parameter = is_master ? state.master : state.param;
  const std::vector<std::uint8_t> before = parameter;
  const std::vector<std::uint8_t> gradient = state.grad;
  void* const goes_to = is_master ? shard.master : shard.param.data;
  if (is_master) {
    shard.to.master = static_cast<float*>(over.data);
  } else if (shard.rest != nullptr) {
    shard.to.param = over;
  } else {
    shard.param = over;
  }
  walk.run(step, shard);
  EXPECT_EQ(parameter, before) << walk.name << ", written over the gradient";
  std::memcpy(goes_to, over.data, shard.count * kernels::element_size(type));
  state.grad = gradient;
}

/// Three steps with changing gradients from the same start, every way, against the reference.
void expect_same_bits(const Optimizer& optimizer, const Layout& layout, std::size_t shift) {
  SCOPED_TRACE(optimizer.name + ", " + layout.name());
  static ThreadPool one(1, "one");
  static ThreadPool three(3, "three");
#ifdef __SANITIZE_THREAD__
  constexpr std::uint64_t kSteps = 1;  // the scalar reference crawls there, and races show at once
#else
  constexpr std::uint64_t kSteps = 3;
#endif
  const auto gradient = [&](std::uint64_t n) {
    return OptimizerState(layout, kCount, shift, static_cast<std::uint32_t>(100 + n));
  };
  const std::vector<OptimizerState> gradients = {gradient(1), gradient(2), gradient(3)};
  const OptimizerState start(layout, kCount, shift, 1);

  OptimizerState expected = start;
  const auto step_of = [](std::uint64_t n) { return Step{n, n == 2 ? 0.25 : 1.0, kSeed}; };
  for (std::uint64_t n = 1; n <= kSteps; ++n) {
    const Step step = step_of(n);
    expected.take_gradient(gradients[n - 1]);
    expected.step_plainly(kSeed, n, kFirstIndex, [&](float g, float& p, float& m, float& v) {
      optimizer.plain(step, g, p, m, v);
    });
  }
  for (const Walk& walk : walks(optimizer, one, three)) {
    OptimizerState state = start;
    OptimizerState moved = start;
    OptimizerState swapped = start;
    for (std::uint64_t n = 1; n <= kSteps; ++n) {
      state.take_gradient(gradients[n - 1]);
      walk.run(step_of(n), state.shard(kFirstIndex));
      moved.take_gradient(gradients[n - 1]);
      step_elsewhere(walk, step_of(n), moved, n % 2 == 1);
      swapped.take_gradient(gradients[n - 1]);
      step_over_gradient(walk, step_of(n), swapped);
    }
    EXPECT_EQ(state.difference(expected), "") << walk.name;
    EXPECT_EQ(moved.difference(expected), "") << walk.name << ", written elsewhere";
    EXPECT_EQ(swapped.difference(expected), "") << walk.name << ", over the gradient";
  }
}

Optimizer adam(Decay decay, double weight_decay) {
  const kernels::AdamConfig config{.lr = 1e-3,
                                   .beta1 = 0.9,
                                   .beta2 = 0.99,
                                   .eps = 1e-8,
                                   .weight_decay = weight_decay,
                                   .decay = decay};
  return {fmt::format("adam, {} decay {}", decay == Decay::L2 ? "L2" : "decoupled", weight_decay),
          [config](const Step& step, const OptimizerShard& shard, Isa isa, ThreadPool* pool) {
            if (pool == nullptr) return kernels::adam_step(config, step, shard, isa);
            kernels::adam_step(config, step, shard, *pool, Priority::Normal, isa);
          },
          [config](const Step& step, float g, float& p, float& m, float& v) {
            double power1 = 1;
            double power2 = 1;
            for (std::uint64_t i = 0; i < step.number; ++i) {
              power1 *= config.beta1;
              power2 *= config.beta2;
            }
            const bool l2 = config.decay == Decay::L2;
            reference::Scalars s;
            s.grad_scale = static_cast<float>(step.grad_scale);
            s.has_l2 = l2 && config.weight_decay != 0;
            s.l2 = static_cast<float>(config.weight_decay);
            s.keep = l2 ? 1.0F : static_cast<float>(1 - config.lr * config.weight_decay);
            s.beta1 = static_cast<float>(config.beta1);
            s.rest1 = static_cast<float>(1 - config.beta1);
            s.beta2 = static_cast<float>(config.beta2);
            s.rest2 = static_cast<float>(1 - config.beta2);
            s.step_size = static_cast<float>(config.lr / (1 - power1));
            s.unbias2 = static_cast<float>(1 / std::sqrt(1 - power2));
            s.eps = static_cast<float>(config.eps);
            reference::adam(s, g, p, m, v);
          }};
}

Optimizer lion() {
  const kernels::LionConfig config{.lr = 1e-4, .beta1 = 0.9, .beta2 = 0.99, .weight_decay = 0.1};
  return {"lion",
          [config](const Step& step, const OptimizerShard& shard, Isa isa, ThreadPool* pool) {
            if (pool == nullptr) return kernels::lion_step(config, step, shard, isa);
            kernels::lion_step(config, step, shard, *pool, Priority::Normal, isa);
          },
          [config](const Step& step, float g, float& p, float& m, float&) {
            reference::Scalars s;
            s.grad_scale = static_cast<float>(step.grad_scale);
            s.lr = static_cast<float>(config.lr);
            s.keep = static_cast<float>(1 - config.lr * config.weight_decay);
            s.beta1 = static_cast<float>(config.beta1);
            s.rest1 = static_cast<float>(1 - config.beta1);
            s.beta2 = static_cast<float>(config.beta2);
            s.rest2 = static_cast<float>(1 - config.beta2);
            reference::lion(s, g, p, m);
          }};
}

Optimizer sgd(const kernels::SgdConfig& config) {
  return {fmt::format("sgd, momentum {}, nesterov {}", config.momentum, config.nesterov),
          [config](const Step& step, const OptimizerShard& shard, Isa isa, ThreadPool* pool) {
            if (pool == nullptr) return kernels::sgd_step(config, step, shard, isa);
            kernels::sgd_step(config, step, shard, *pool, Priority::Normal, isa);
          },
          [config](const Step& step, float g, float& p, float& m, float&) {
            const bool l2 = config.decay == Decay::L2;
            reference::Scalars s;
            s.grad_scale = static_cast<float>(step.grad_scale);
            s.lr = static_cast<float>(config.lr);
            s.has_l2 = l2 && config.weight_decay != 0;
            s.l2 = static_cast<float>(config.weight_decay);
            s.keep = l2 ? 1.0F : static_cast<float>(1 - config.lr * config.weight_decay);
            s.beta1 = step.number == 1 ? 0.0F : static_cast<float>(config.momentum);
            s.rest1 = step.number == 1 ? 1.0F : static_cast<float>(1 - config.dampening);
            s.lookahead = static_cast<float>(config.momentum);
            s.nesterov = config.nesterov;
            reference::sgd(s, config.momentum != 0, g, p, m);
          }};
}

constexpr Dtype kGrads[] = {Dtype::F32, Dtype::BF16, Dtype::F16};
constexpr Layout::Moments kMoments[] = {Layout::Moments::F32, Layout::Moments::BF16};
constexpr Layout::Param kWhole[] = {Layout::Param::IsMaster, Layout::Param::F32,
                                    Layout::Param::BF16, Layout::Param::F16};

TEST(KernelBits, AdamWithAWholeMaster) {
  const Optimizer optimizer = adam(Decay::Decoupled, 0.1);
  std::size_t shift = 0;
  for (const Dtype grad : kGrads) {
    for (const Layout::Param param : kWhole) {
      for (const Layout::Moments moments : kMoments) {
        expect_same_bits(optimizer, {grad, param, moments, true}, shift++ % 3);
      }
    }
  }
}

TEST(KernelBits, AdamWithASplitMaster) {
  const Optimizer optimizer = adam(Decay::Decoupled, 0.1);
  std::size_t shift = 0;
  for (const Dtype grad : kGrads) {
    for (const Layout::Moments moments : kMoments) {
      expect_same_bits(optimizer, {grad, Layout::Param::Split, moments, true}, shift++ % 3);
    }
  }
}

TEST(KernelBits, AdamWithL2AndWithoutDecay) {
  expect_same_bits(adam(Decay::L2, 0.1), {}, 0);
  expect_same_bits(adam(Decay::L2, 0), {}, 1);
  expect_same_bits(adam(Decay::Decoupled, 0), {}, 2);
}

TEST(KernelBits, Lion) {
  std::size_t shift = 0;
  for (const Dtype grad : kGrads) {
    for (const Layout::Moments moments : kMoments) {
      const Layout::Param param = kWhole[shift % 4];
      expect_same_bits(lion(), {grad, param, moments, false}, shift++ % 3);
    }
  }
}

TEST(KernelBits, Sgd) {
  std::size_t shift = 0;
  for (const Dtype grad : kGrads) {
    for (const Layout::Moments moments : kMoments) {
      const Layout::Param param = kWhole[shift % 4];
      const bool nesterov = shift % 2 == 0;
      expect_same_bits(sgd({.momentum = 0.9,
                            .dampening = nesterov ? 0 : 0.1,
                            .weight_decay = 0.1,
                            .decay = shift % 3 == 0 ? Decay::Decoupled : Decay::L2,
                            .nesterov = nesterov}),
                       {grad, param, moments, false}, shift % 3);
      ++shift;
    }
    expect_same_bits(sgd({.momentum = 0, .weight_decay = 0.1}),
                     {grad, kWhole[shift % 4], Layout::Moments::None, false}, 0);
  }
}

}  // namespace
}  // namespace pagoda
