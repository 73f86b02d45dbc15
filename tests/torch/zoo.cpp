// SPDX-License-Identifier: Apache-2.0
#include "torch/zoo.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <set>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>

#include "pagoda/base/error.h"
#include "pagoda/kernels/rounding_counter.h"
#include "torch/specimen.h"

namespace zoo {
namespace {

using pagoda::kernels::mix64;

constexpr std::array kKinds{Kind::Gpt,    Kind::TiedGpt, Kind::Moe,   Kind::Conv,
                            Kind::Lstm,   Kind::Loop,    Kind::Views, Kind::Transposed,
                            Kind::Frozen, Kind::Outside, Kind::Empty, Kind::Mixed};
constexpr std::array<std::string_view, kKinds.size()> kKindNames{
    "gpt",   "tied_gpt",   "moe",    "conv",    "lstm",  "loop",
    "views", "transposed", "frozen", "outside", "empty", "mixed"};
constexpr std::array<std::string_view, 3> kCheckpointingNames{"none", "reentrant", "saved_hooks"};

template <class Enum, std::size_t N>
Enum parse(std::string_view what, std::string_view text,
           const std::array<std::string_view, N>& names) {
  for (std::size_t i = 0; i < N; ++i) {
    if (names[i] == text) return static_cast<Enum>(i);
  }
  throw pagoda::UserError(
      fmt::format("there is no {} '{}'; there are {}", what, text, fmt::join(names, ", ")));
}

std::shared_ptr<Specimen> construct(const Options& options) {
  switch (options.kind) {
    case Kind::Gpt:
    case Kind::TiedGpt:
      return make_gpt(options);
    case Kind::Moe:
      return make_moe(options);
    case Kind::Conv:
      return make_conv(options);
    case Kind::Lstm:
      return make_lstm(options);
    case Kind::Loop:
      return make_loop(options);
    default:
      return make_awkward(options);
  }
}

/// Values of a size that trains, drawn in fp32 and rounded: the same however the type came about.
void initialise(const ::torch::nn::Module& module, std::uint64_t seed) {
  const at::NoGradGuard no_grad;
  std::uint64_t index = 0;
  for (auto& [key, parameter] : parameters_once(module)) {
    at::Generator random = at::detail::createCPUGenerator(mix64(mix64(seed) ^ index++));
    at::Tensor values = at::randn(parameter.sizes(), random, at::kFloat);
    if (parameter.dim() >= 2) {
      const double fan_in = static_cast<double>(parameter.numel()) /
                            static_cast<double>(std::max<std::int64_t>(parameter.size(0), 1));
      values.mul_(1.0 / std::sqrt(std::max(fan_in, 1.0)));
    } else {
      values.mul_(0.02);
      if (key.ends_with("weight")) values.add_(1);  // a norm's
    }
    parameter.copy_(values);
  }
}

Bits bits_of(const std::string& key, const at::Tensor& tensor) {
  // A copy by an operator, even where the tensor is contiguous.
  const at::Tensor copy = tensor.detach().clone(at::MemoryFormat::Contiguous).cpu();
  Bits out{key, dtype_of(copy), true, std::vector<std::byte>(copy.nbytes())};
  if (!out.bytes.empty()) std::memcpy(out.bytes.data(), copy.const_data_ptr(), out.bytes.size());
  return out;
}

}  // namespace

std::span<const Kind> all_kinds() {
  return kKinds;
}

std::string_view name(Kind kind) {
  return kKindNames[static_cast<std::size_t>(kind)];
}

std::string_view name(Checkpointing checkpointing) {
  return kCheckpointingNames[static_cast<std::size_t>(checkpointing)];
}

Kind parse_kind(std::string_view text) {
  return parse<Kind>("kind of model", text, kKindNames);
}

Checkpointing parse_checkpointing(std::string_view text) {
  return parse<Checkpointing>("checkpointing", text, kCheckpointingNames);
}

bool exists(const Options& options) {
  const bool has_blocks =
      options.kind == Kind::Gpt || options.kind == Kind::TiedGpt || options.kind == Kind::Loop;
  return has_blocks || options.checkpointing == Checkpointing::None;
}

std::shared_ptr<::torch::nn::Module> make(const Options& options) {
  PAGODA_REQUIRE(exists(options), "a {} has no blocks to checkpoint", name(options.kind));
  std::shared_ptr<Specimen> model = construct(options);
  if (options.casting == Casting::Afterwards && options.dtype != Dtype::F32 &&
      options.kind != Kind::Mixed) {
    model->to(scalar_type(options.dtype));
  }
  if (options.device != "cpu") model->to(at::Device(options.device));
  initialise(*model, options.seed);
  model->train();
  return model;
}

at::Tensor loss(::torch::nn::Module& module, std::uint64_t batch_seed) {
  auto* specimen = dynamic_cast<Specimen*>(&module);
  PAGODA_REQUIRE(specimen != nullptr, "the module is not one that make() returned");
  return specimen->loss(at::detail::createCPUGenerator(batch_seed));
}

std::uint64_t batch_seed(std::uint64_t seed, int rank, int step, int micro_batch) {
  std::uint64_t out = mix64(seed);
  for (const int part : {rank, step, micro_batch}) {
    out = mix64(out ^ static_cast<std::uint64_t>(part));
  }
  return out;
}

void use_one_torch_thread() {
  at::set_num_threads(1);
}

Layout layout(const ::torch::nn::Module& module) {
  Layout out;
  std::set<const c10::StorageImpl*> storages;
  for (const auto& [key, parameter] : parameters_once(module)) {
    ++out.parameters;
    if (parameter.is_contiguous()) ++out.contiguous;
    storages.insert(parameter.storage().unsafeGetStorageImpl());
  }
  out.storages = static_cast<int>(storages.size());
  return out;
}

std::vector<Bits> parameter_bits(const ::torch::nn::Module& module) {
  std::vector<Bits> out;
  for (const auto& [key, parameter] : parameters_once(module)) {
    out.push_back(bits_of(key, parameter));
  }
  return out;
}

std::vector<Bits> gradient_bits(::torch::nn::Module& module, std::uint64_t batch_seed) {
  auto parameters = parameters_once(module);
  for (auto& [key, parameter] : parameters) parameter.mutable_grad() = at::Tensor();
  loss(module, batch_seed).backward();
  std::vector<Bits> out;
  for (auto& [key, parameter] : parameters) {
    if (parameter.grad().defined()) {
      out.push_back(bits_of(key, parameter.grad()));
    } else {
      out.push_back({key, dtype_of(parameter), false, {}});
    }
    parameter.mutable_grad() = at::Tensor();
  }
  return out;
}

}  // namespace zoo
