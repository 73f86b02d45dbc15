// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/operator_traits.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <unordered_map>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

namespace pagoda::torch {
namespace {

// Operators that look at sizes and options of a tensor, not at its bytes.
constexpr std::array<std::string_view, 22> kShapeOnly = {"aten::empty_like",
                                                         "aten::zeros_like",
                                                         "aten::ones_like",
                                                         "aten::full_like",
                                                         "aten::rand_like",
                                                         "aten::randn_like",
                                                         "aten::randint_like",
                                                         "aten::new_empty",
                                                         "aten::new_empty_strided",
                                                         "aten::new_zeros",
                                                         "aten::new_ones",
                                                         "aten::new_full",
                                                         "aten::is_same_size",
                                                         "aten::size",
                                                         "aten::stride",
                                                         "aten::sym_size",
                                                         "aten::sym_stride",
                                                         "aten::sym_numel",
                                                         "aten::sym_storage_offset",
                                                         "aten::_has_same_storage_numel",
                                                         "aten::_has_compatible_shallow_copy_type",
                                                         "aten::requires_grad_"};

// Composite operators and views with kernels that look at the bytes of an argument themselves.
constexpr std::array<std::string_view, 3> kReaders = {"aten::max_pool1d", "aten::tensor_split",
                                                      "aten::ctc_loss"};

constexpr std::array<std::string_view, 4> kRecurrent = {"aten::lstm", "aten::gru", "aten::rnn_tanh",
                                                        "aten::rnn_relu"};

/// Over lists: each tensor's page is brought in on its own (list_operators.h).
bool is_over_a_list(std::string_view name) {
  return name.starts_with("aten::_foreach_") || name == "aten::cat" || name == "aten::stack";
}

template <std::size_t kCount>
bool is_one_of(const std::array<std::string_view, kCount>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// All results alias inputs and nothing is written: only sizes and strides change.
bool is_view(const c10::FunctionSchema& schema) {
  if (schema.returns().empty()) return false;
  for (const auto& result : schema.returns()) {
    const auto* alias = result.alias_info();
    if (alias == nullptr || alias->isWrite()) return false;
  }
  return true;
}

/// Made of operators that are announced themselves, on every device. Some that could be have a
/// kernel for one: silu_backward, and on a GPU _fused_rms_norm.
bool is_composite(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) &&
         !op.hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
         !op.hasKernelForDispatchKey(c10::DispatchKey::CUDA);
}

OperatorTraits learn(const at::RecordFunction& function) {
  OperatorTraits traits;
  const auto name = function.operator_name();
  if (!name) {
    // Announced by hand, without a schema, beside aten::detach.
    const std::string_view by_hand = function.name();
    traits.needs_no_data = by_hand == "detach" || by_hand == "detach_";
    return traits;
  }
  traits.needs_no_data = is_one_of(kShapeOnly, name->name) || is_over_a_list(name->name);
  traits.looks_up = name->name == "aten::embedding";
  traits.reads_pointers_on_gpu = is_one_of(kRecurrent, name->name);
  const auto found = c10::Dispatcher::singleton().findSchema(*name);
  if (!found) return traits;
  const c10::FunctionSchema& schema = found->schema();
  traits.needs_no_data = !is_one_of(kReaders, name->name) &&
                         (traits.needs_no_data || is_view(schema) || is_composite(*found));
  for (std::size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite())
      traits.writes |= std::uint64_t{1} << (i < 63 ? i : 63);
  }
  return traits;
}

struct Known {
  std::string name;
  OperatorTraits traits;
};

}  // namespace

const OperatorTraits& operator_traits(const at::RecordFunction& function) {
  // Every overload's schema has its own name string: its address tells overloads apart. An operator
  // that is unregistered may leave its address to another, so the text is compared, too.
  thread_local std::unordered_map<const char*, Known> known;
  const char* name = function.name();
  const auto found = known.find(name);
  if (found != known.end() && found->second.name == name) return found->second.traits;
  return (known[name] = {name, learn(function)}).traits;
}

}  // namespace pagoda::torch
