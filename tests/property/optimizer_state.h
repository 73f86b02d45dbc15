// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "pagoda/kernels/master_split.h"
#include "pagoda/kernels/optimizer_shard.h"
#include "property/kernel_reference.h"

namespace pagoda {

/// How the state of a parameter under test is stored.
struct Layout {
  kernels::Dtype grad = kernels::Dtype::F32;
  enum class Param { IsMaster, F32, BF16, F16, Split } param = Param::IsMaster;
  enum class Moments { None, F32, BF16 } moments = Moments::F32;
  bool variance = true;

  std::string name() const {
    static constexpr const char* kParams[] = {"is master", "fp32", "bf16", "fp16", "split"};
    static constexpr const char* kMoments[] = {"no", "fp32", "bf16"};
    return fmt::format("{} gradient, parameter {}, {} moments", kernels::dtype_name(grad),
                       kParams[static_cast<int>(param)], kMoments[static_cast<int>(moments)]);
  }
};

/// Patterns that arithmetic and rounding treat specially.
inline std::uint32_t special_bits(std::mt19937& random) {
  static constexpr std::uint32_t kSpecial[] = {
      0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x00008000,
      0x3F800000, 0x3F808000, 0x3F818000, 0xBF808000, 0xBF818000, 0x3F807FFF, 0x3F808001,
      0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0xFF7F8000, 0x7F800000, 0xFF800000, 0x7FC00000,
      0x7F800001, 0xFFC01234, 0xFF800001, 0x7FFFFFFF, 0x477FF000, 0x477FEFFF, 0x38800000,
      0x387FFFFF, 0x33000000, 0x33000001, 0x5F000000, 0x1F000000, 0x7E967699};
  return kSpecial[random() % std::size(kSpecial)];
}

/// One parameter with all its arrays, each a few elements into its buffer: `shift` moves them off
/// the alignment of a vector.
class OptimizerState {
 public:
  using Bytes = std::vector<std::uint8_t>;

  OptimizerState(const Layout& layout, std::size_t count, std::size_t shift, std::uint32_t seed)
      : layout_(layout), count_(count), shift_(shift) {
    using kernels::element_size;
    std::mt19937 random(seed);
    const bool split = layout.param == Layout::Param::Split;
    grad = fill(layout.grad, random, false);
    momentum = fill(moment_type(), random, false);
    variance = fill(moment_type(), random, true);
    rest.resize((count + shift) * 2 + 64);
    param.resize((count + shift) * 4 + 64);
    master = fill(kernels::Dtype::F32, random, false);
    if (split) {
      auto* whole = reinterpret_cast<float*>(master.data()) + shift;
      kernels::split_masters(whole, reinterpret_cast<kernels::Bf16*>(param.data()) + shift,
                             reinterpret_cast<std::int16_t*>(rest.data()) + shift,
                             kernels::Elements(moment_type(), variance.data()).from(shift), count,
                             kernels::Isa::Scalar);
    }
  }

  kernels::OptimizerShard shard(std::uint64_t first_index) {
    kernels::OptimizerShard out;
    out.first_index = first_index;
    out.count = count_;
    out.grad = kernels::ConstElements(layout_.grad, grad.data()).from(shift_);
    if (layout_.param == Layout::Param::Split) {
      out.rest = reinterpret_cast<std::int16_t*>(rest.data()) + shift_;
    } else {
      out.master = reinterpret_cast<float*>(master.data()) + shift_;
    }
    if (layout_.param != Layout::Param::IsMaster) {
      out.param = kernels::Elements(param_type(), param.data()).from(shift_);
    }
    if (layout_.moments != Layout::Moments::None) {
      out.momentum = kernels::Elements(moment_type(), momentum.data()).from(shift_);
      if (layout_.variance) {
        out.variance = kernels::Elements(moment_type(), variance.data()).from(shift_);
      }
    }
    return out;
  }

  /// "" where all arrays are equal byte for byte, else the first difference.
  std::string difference(const OptimizerState& other) const {
    const auto compare = [](const char* name, const Bytes& a, const Bytes& b) -> std::string {
      for (std::size_t i = 0; i < a.size(); ++i) {
        if (a[i] != b[i]) return fmt::format("{} differs from byte {} on", name, i);
      }
      return {};
    };
    std::string out = compare("gradient", grad, other.grad);
    if (out.empty()) out = compare("master", master, other.master);
    if (out.empty()) out = compare("parameter", param, other.param);
    if (out.empty()) out = compare("rest", rest, other.rest);
    if (out.empty()) out = compare("momentum", momentum, other.momentum);
    if (out.empty()) out = compare("variance", variance, other.variance);
    return out;
  }

  /// The reference: rule(g, p, m, v) on every element, everything around it as numerics.md says.
  template <class Rule>
  void step_plainly(std::uint64_t seed, std::uint64_t step, std::uint64_t first_index,
                    const Rule& rule) {
    namespace ref = reference;
    const bool split = layout_.param == Layout::Param::Split;
    const bool small = layout_.moments == Layout::Moments::BF16;
    for (std::size_t k = 0; k < count_; ++k) {
      const std::size_t i = k + shift_;
      const float g = ref::value(get(grad, layout_.grad, i));
      float m = 0;
      float v = 0;
      bool tie = false;
      if (layout_.moments != Layout::Moments::None) {
        m = ref::value(get(momentum, moment_type(), i));
        const std::uint32_t stored = get(variance, moment_type(), i);
        tie = (stored >> 31) != 0;
        v = ref::value(split ? stored & 0x7FFFFFFF : stored);
      }
      float p = 0;
      if (split) {
        const auto low = at<std::int16_t>(rest, i);
        p = ref::value(kernels::join_master({{at<std::uint16_t>(param, i)}, low, tie}));
      } else {
        p = at<float>(master, i);
      }
      rule(g, p, m, v);
      std::uint32_t sign = 0;
      if (split) {
        const kernels::SplitMaster parts = kernels::split_master(ref::bits(p));
        at<std::uint16_t>(param, i) = parts.param.bits;
        at<std::int16_t>(rest, i) = parts.rest;
        sign = parts.tie ? 0x80000000U : 0U;
      } else {
        at<float>(master, i) = p;
        if (layout_.param == Layout::Param::F32) at<float>(param, i) = p;
        if (layout_.param == Layout::Param::BF16) {
          at<std::uint16_t>(param, i) = ref::to_bf16(ref::bits(p));
        }
        if (layout_.param == Layout::Param::F16) {
          at<std::uint16_t>(param, i) = ref::to_fp16(ref::bits(p));
        }
      }
      if (layout_.moments == Layout::Moments::None) continue;
      if (small) {
        const std::uint32_t random = ref::random_word(seed, step, first_index + k);
        at<std::uint16_t>(momentum, i) = ref::round_stochastically(m, random & 0xFFFF);
        if (layout_.variance) {
          at<std::uint16_t>(variance, i) =
              static_cast<std::uint16_t>(ref::round_stochastically(v, random >> 16) | (sign >> 16));
        }
      } else {
        at<float>(momentum, i) = m;
        if (layout_.variance) at<std::uint32_t>(variance, i) = ref::bits(v) | sign;
      }
    }
  }

  /// Takes the gradient of another state, as at the next step.
  void take_gradient(const OptimizerState& from) { grad = from.grad; }

  Bytes grad, master, param, rest, momentum, variance;

 private:
  kernels::Dtype moment_type() const {
    return layout_.moments == Layout::Moments::BF16 ? kernels::Dtype::BF16 : kernels::Dtype::F32;
  }
  kernels::Dtype param_type() const {
    return layout_.param == Layout::Param::F32   ? kernels::Dtype::F32
           : layout_.param == Layout::Param::F16 ? kernels::Dtype::F16
                                                 : kernels::Dtype::BF16;
  }

  template <class T>
  static T& at(Bytes& bytes, std::size_t i) {
    return reinterpret_cast<T*>(bytes.data())[i];
  }
  static std::uint32_t get(Bytes& bytes, kernels::Dtype type, std::size_t i) {
    if (type == kernels::Dtype::F32) return at<std::uint32_t>(bytes, i);
    const auto half = at<std::uint16_t>(bytes, i);
    return type == kernels::Dtype::BF16 ? reference::from_bf16(half) : reference::from_fp16(half);
  }

  /// Mostly numbers as in training, one in eight special. Not negative for a second moment.
  Bytes fill(kernels::Dtype type, std::mt19937& random, bool positive) {
    std::normal_distribution<float> normal(0.0F, positive ? 1e-4F : 1e-2F);
    Bytes bytes((count_ + shift_) * kernels::element_size(type) + 64, 0xA5);
    for (std::size_t i = 0; i < count_ + shift_; ++i) {
      std::uint32_t x = random() % 8 == 0 ? special_bits(random) : reference::bits(normal(random));
      if (positive) x &= 0x7FFFFFFF;
      if (type == kernels::Dtype::F32) at<std::uint32_t>(bytes, i) = x;
      if (type == kernels::Dtype::BF16) at<std::uint16_t>(bytes, i) = reference::to_bf16(x);
      if (type == kernels::Dtype::F16) at<std::uint16_t>(bytes, i) = reference::to_fp16(x);
    }
    return bytes;
  }

  Layout layout_;
  std::size_t count_;
  std::size_t shift_;
};

}  // namespace pagoda
