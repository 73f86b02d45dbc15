// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/list_operators.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/cat_meta_dispatch.h>
#include <ATen/ops/cat_ops.h>
#include <c10/util/Exception.h>

#include "pagoda/base/ranked_mutex.h"
#include "pagoda/torch/kernel_pages.h"
#include "pagoda/torch/observer.h"
#include "pagoda/torch/storage_table.h"

namespace pagoda::torch {
namespace {

using Stack = std::vector<c10::IValue>;

// torch hands out the kernel that it would call, but to be called with boxed arguments only: an
// explicit instantiation may name the private member.
template <c10::KernelFunction c10::SafeKernelFunction::*Member>
struct OpenKernel {
  friend const c10::KernelFunction& kernel_in(const c10::SafeKernelFunction& safe) {
    return safe.*Member;
  }
};
const c10::KernelFunction& kernel_in(const c10::SafeKernelFunction& safe);
template struct OpenKernel<&c10::SafeKernelFunction::kernel_>;

/// A kernel that another one has taken the place of.
struct Replaced {
  c10::OperatorHandle handle;
  c10::KernelFunction kernel;
};

bool has_page(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() &&
         StorageTable::instance().find(
             tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()) != nullptr;
}

// ---- _foreach_*

bool has_page(const c10::IValue& argument) {
  if (argument.isTensor()) return has_page(argument.toTensor());
  if (!argument.isList()) return false;
  const auto elements = argument.toListRef();
  return std::any_of(elements.begin(), elements.end(), [](const c10::IValue& element) {
    return element.isTensor() && has_page(element.toTensor());
  });
}

/// Elements [begin, end) of a list.
c10::IValue part_of(const c10::IValue& list, std::size_t begin, std::size_t end) {
  const c10::List<c10::IValue> all = list.toList();
  c10::impl::GenericList part(all.elementType());
  part.reserve(end - begin);
  for (std::size_t i = begin; i < end; ++i) part.push_back(all.get(i));
  return part;
}

/// A call of a `_foreach_*` operator, as the lists that it goes through.
class ListCall {
 public:
  ListCall(const c10::FunctionSchema& schema, const Stack& stack)
      : schema_(schema),
        arguments_(stack.end() - static_cast<std::ptrdiff_t>(count()), stack.end()) {
    for (const c10::IValue& argument : arguments_) {
      if (!argument.isList()) continue;
      const std::size_t here = argument.toListRef().size();
      if (!length_) length_ = here;
      equal_ = equal_ && here == *length_;
    }
  }

  std::size_t length() const noexcept { return length_.value_or(0); }
  /// Whether it can be cut at all. Where the lists are of different lengths torch will say so.
  bool equal_lists() const noexcept { return equal_ && length_; }

  /// Adds the pages of elements [begin, end), and those of tensors that all of them share.
  void add(KernelPages& pages, std::size_t begin, std::size_t end) const {
    for (std::size_t a = 0; a < arguments_.size(); ++a) {
      const c10::IValue& argument = arguments_[a];
      const auto* alias = schema_.arguments()[a].alias_info();
      const bool write = alias != nullptr && alias->isWrite();
      if (argument.isTensor()) pages.add(argument.toTensor(), write);
      if (!argument.isList()) continue;
      const auto elements = argument.toListRef();
      for (std::size_t i = begin; i < end && elements[i].isTensor(); ++i) {
        pages.add(elements[i].toTensor(), write);
      }
    }
  }

  /// The arguments of a call over elements [begin, end).
  Stack part(std::size_t begin, std::size_t end) const {
    Stack out;
    out.reserve(arguments_.size());
    for (std::size_t a = 0; a < arguments_.size(); ++a) {
      const c10::IValue& argument = arguments_[a];
      if (argument.isList()) {
        out.push_back(part_of(argument, begin, end));
      } else if (argument.isTensor() && schema_.arguments()[a].name() == "scalars") {
        // One number for each element, as a tensor.
        out.emplace_back(argument.toTensor().narrow(0, static_cast<std::int64_t>(begin),
                                                    static_cast<std::int64_t>(end - begin)));
      } else {
        out.push_back(argument);
      }
    }
    return out;
  }

 private:
  std::size_t count() const { return schema_.arguments().size(); }

  const c10::FunctionSchema& schema_;
  const Stack arguments_;
  std::optional<std::size_t> length_;
  bool equal_ = true;
};

/// In the place of a kernel over whole lists: calls it for parts whose pages fit.
class ForeachInParts final : public c10::OperatorKernel {
 public:
  explicit ForeachInParts(c10::KernelFunction replaced) : replaced_(std::move(replaced)) {}

  void operator()(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, Stack* stack) {
    const auto count = static_cast<std::ptrdiff_t>(handle.schema().arguments().size());
    if (observer::no_pages() ||
        std::none_of(stack->end() - count, stack->end(),
                     [](const c10::IValue& argument) { return has_page(argument); })) {
      return replaced_.callBoxed(handle, keys, stack);
    }
    const ListCall call(handle.schema(), *stack);
    if (!call.equal_lists()) return replaced_.callBoxed(handle, keys, stack);
    // Half of the room leaves the other half for what is fetched ahead.
    Bytes most_bytes = 0;
    {
      KernelPages all;
      call.add(all, 0, call.length());
      most_bytes = all.room() / 2;
      if (all.needed() <= most_bytes && !all.touch()) {
        return replaced_.callBoxed(handle, keys, stack);
      }
    }
    c10::List<at::Tensor> results;
    const bool gives_results = !handle.schema().returns().empty();
    std::size_t most = call.length();
    for (std::size_t begin = 0; begin < call.length();) {
      std::size_t end = begin + 1;
      for (Bytes sum = needed(call, begin); end < call.length() && end - begin < most; ++end) {
        sum += needed(call, end);
        if (sum > most_bytes) break;
      }
      KernelPages pages;
      call.add(pages, begin, end);
      if (const auto too_large = pages.touch()) {
        if (end - begin == 1) throw std::runtime_error(*too_large);
        most = (end - begin) / 2;  // pinned pages are in the way
        continue;
      }
      Stack part = call.part(begin, end);
      replaced_.callBoxed(handle, keys, &part);
      if (gives_results) results.append(part.back().toTensorList());
      begin = end;
    }
    stack->erase(stack->end() - count, stack->end());
    if (gives_results) stack->emplace_back(std::move(results));
  }

 private:
  static Bytes needed(const ListCall& call, std::size_t element) {
    KernelPages pages;
    call.add(pages, element, element + 1);
    return pages.needed();
  }

  const c10::KernelFunction replaced_;
};

// ---- cat

/// One tensor after the other: each copy is an operator of its own.
void copy_pieces(const at::MaterializedITensorListRef& tensors, std::int64_t dim,
                 const at::Tensor& to) {
  dim = at::maybe_wrap_dim(dim, to.dim());
  std::int64_t at = 0;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.dim() == 1 && tensor.numel() == 0) continue;  // fits everything, as ever with torch
    const std::int64_t size = tensor.size(dim);
    to.narrow(dim, at, size).copy_(tensor);
    at += size;
  }
}

/// Brings the pages of a cat() in, if it has some. False: they do not fit together.
bool bring_in(std::optional<KernelPages>& pages, const at::ITensorListRef& tensors,
              const at::Tensor* out) {
  if (observer::no_pages()) return true;
  const bool any = std::any_of(tensors.begin(), tensors.end(),
                               [](const at::Tensor& tensor) { return has_page(tensor); });
  if (!any && (out == nullptr || !has_page(*out))) return true;
  pages.emplace();
  for (const at::Tensor& tensor : tensors) pages->add(tensor, false);
  if (out != nullptr) pages->add(*out, true);
  if (pages->needed() <= pages->room() && !pages->touch()) return true;
  pages.reset();
  return false;
}

class CatInPieces final : public c10::OperatorKernel {
 public:
  explicit CatInPieces(Replaced replaced) : replaced_(std::move(replaced)) {}

  at::Tensor operator()(c10::DispatchKeySet keys, const at::ITensorListRef& tensors,
                        std::int64_t dim) {
    std::optional<KernelPages> pages;
    if (!bring_in(pages, tensors, nullptr)) {
      const at::AutoDispatchBelowADInplaceOrView below;
      const auto all = tensors.materialize();
      const at::Tensor shape = at::meta::cat(tensors, dim);  // throws what cat() would
      at::Tensor result = at::empty_strided(shape.sizes(), shape.strides(),
                                            shape.options().device(all.front().get().device()));
      copy_pieces(all, dim, result);
      return result;
    }
    return replaced_.kernel.call<at::Tensor, const at::ITensorListRef&, std::int64_t>(
        replaced_.handle, keys, tensors, dim);
  }

 private:
  const Replaced replaced_;
};

class CatOutInPieces final : public c10::OperatorKernel {
 public:
  explicit CatOutInPieces(Replaced replaced) : replaced_(std::move(replaced)) {}

  at::Tensor& operator()(c10::DispatchKeySet keys, const at::ITensorListRef& tensors,
                         std::int64_t dim, at::Tensor& out) {
    std::optional<KernelPages> pages;
    if (!bring_in(pages, tensors, &out)) {
      const at::AutoDispatchBelowADInplaceOrView below;
      const auto all = tensors.materialize();
      const at::Tensor shape = at::meta::cat(tensors, dim);  // throws what cat() would
      TORCH_CHECK_TYPE(c10::canCast(shape.scalar_type(), out.scalar_type()),
                       "torch.cat(): input types can't be cast to the desired output type ",
                       out.scalar_type());
      for (const at::Tensor& tensor : all) {
        TORCH_CHECK(tensor.storage().unsafeGetStorageImpl() != out.storage().unsafeGetStorageImpl(),
                    "unsupported operation: some elements of the input tensor and the written-to "
                    "tensor refer to a single memory location. Please clone() the tensor before "
                    "performing the operation.");
      }
      at::native::resize_output(out, shape.sizes());
      copy_pieces(all, dim, out);
      return out;
    }
    return replaced_.kernel.call<at::Tensor&, const at::ITensorListRef&, std::int64_t, at::Tensor&>(
        replaced_.handle, keys, tensors, dim, out);
  }

 private:
  const Replaced replaced_;
};

// ---- registration

/// torch warns of a kernel that takes another one's place.
struct Silence final : c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

void put_in_place(const c10::OperatorHandle& handle, c10::DispatchKey key,
                  c10::KernelFunction kernel, std::optional<c10::impl::CppSignature> signature) {
  Silence silence;
  const c10::WarningUtils::WarningHandlerGuard quietly(&silence);
  // Never taken back: operators may run at exit.
  static_cast<void>(new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().registerImpl(
      handle.operator_name(), key, std::move(kernel), std::move(signature), nullptr,
      "pagoda: pages of lists")));
}

template <class Kernel, class Schema>
void put_in_place_of(const char* overload, c10::DispatchKey key) {
  const auto handle = c10::Dispatcher::singleton().findSchema({"aten::cat", overload});
  if (!handle || !handle->hasKernelForDispatchKey(key)) return;
  auto kernel = std::make_unique<Kernel>(
      Replaced{*handle, kernel_in(handle->getComputedKernelForDispatchKey(key))});
  put_in_place(*handle, key,
               c10::KernelFunction::makeFromUnboxedFunctor<false, Kernel>(std::move(kernel)),
               c10::impl::CppSignature::make<Schema>());
}

c10::DispatchKey key_of(c10::DeviceType device) {
  return device == c10::kCUDA ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
}

/// `own`: only where the device has a kernel of its own, and is not served by other operators.
void put_in_place_of_foreach(c10::DispatchKey key, bool own) {
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (!name.name.starts_with("aten::_foreach_")) continue;
    const auto handle = dispatcher.findSchema(name);
    if (!handle || (own && !handle->hasKernelForDispatchKey(key))) continue;
    put_in_place(*handle, key,
                 c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<ForeachInParts>(
                     kernel_in(handle->getComputedKernelForDispatchKey(key)))),
                 std::nullopt);
  }
}

}  // namespace

void list_operators::install(c10::DeviceType device) {
  static RankedMutex<LockRank::ListOperators> mutex;
  static std::set<c10::DeviceType> done;  // guarded by mutex
  const std::lock_guard lock(mutex);
  if (!done.insert(device).second) return;
  put_in_place_of<CatInPieces, at::_ops::cat::schema>("", key_of(device));
  put_in_place_of<CatOutInPieces, at::_ops::cat_out::schema>("out", key_of(device));
  put_in_place_of_foreach(key_of(device), true);
}

void list_operators::cut_foreach(c10::DeviceType device) {
  put_in_place_of_foreach(key_of(device), false);
}

}  // namespace pagoda::torch
