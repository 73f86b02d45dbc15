// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/observer.h"

#include <cstring>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/SmallVector.h>
#include <pthread.h>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/base/ranked_mutex.h"
#include "pagoda/base/trace.h"
#include "pagoda/pager/pager.h"
#include "pagoda/torch/birth_scope.h"
#include "pagoda/torch/custom_functions.h"
#include "pagoda/torch/held_pages.h"
#include "pagoda/torch/interpreter_lock.h"
#include "pagoda/torch/operator_traits.h"
#include "pagoda/torch/page_search.h"
#include "pagoda/torch/page_storage.h"
#include "pagoda/torch/passes.h"
#include "pagoda/torch/storage_table.h"
#include "pagoda/torch/table_change.h"
#include "pagoda/torch/table_use.h"

namespace pagoda::torch {
namespace {

thread_local bool looking_up = false;  // this thread's operator reads rows in place
thread_local int denials = 0;          // operators of this thread that are about to throw

struct OperatorContext final : at::ObserverContext {
  HeldPages held;
  std::optional<Held> denied;  // its touch failed: the operator throws when it asks for them
  bool looks_up = false;       // …rows of its one page, in place
  bool applies = false;        // it is the forward of a custom autograd function
  Nanos began = 0;             // with its pages there; 0: not traced
};

/// Whether this is the forward of a custom autograd function in Python: its name is that of a
/// class, and it knows the number of the node that it will make.
bool applies_function(const at::RecordFunction& function) {
  return function.seqNr() >= 0 && at::GradMode::is_enabled() &&
         std::strchr(function.name(), ':') == nullptr;
}

/// Autograd's engine evaluates a node of a backward pass, with all its hooks: the name follows.
constexpr std::string_view kEvaluation = "autograd::engine::evaluate_function: ";

bool evaluates_node(const at::RecordFunction& function) {
  const char* name = function.name();
  return name[0] == 'a' && name[1] == 'u' && std::string_view(name).starts_with(kEvaluation);
}

bool on_a_gpu(const HeldPages& held) {
  return std::any_of(held.begin(), held.end(), [](const Held& one) {
    return one.pager->tiers().device()->kind() == device::DeviceKind::Cuda;
  });
}

/// Whether operators are only what they seem: no mode, transform or tracer sees them before torch's
/// kernels do, and runs others in their place.
bool dispatches_plainly() {
  constexpr c10::DispatchKeySet kWatched({c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                          c10::DispatchKey::FuncTorchDynamicLayerBackMode,
                                          c10::DispatchKey::Functionalize, c10::DispatchKey::Tracer,
                                          c10::DispatchKey::Python});
  return !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
         !c10::impl::tls_local_dispatch_key_set().included_.has_any(kWatched);
}

std::vector<std::int64_t> values_of(const at::Tensor& indices) {
  const at::Tensor here = indices.detach().to(at::kCPU, at::kLong).contiguous();
  const auto* values = here.const_data_ptr<std::int64_t>();
  return {values, values + here.numel()};
}

/// Lets an embedding read its rows where they lie; false: its page is to be touched.
bool look_up(c10::ArrayRef<const c10::IValue> inputs, Held& held) {
  if (held.accesses.size() != 1 || held.accesses[0].write || inputs.size() < 2 ||
      !inputs[0].isTensor() || !inputs[1].isTensor() || !dispatches_plainly()) {
    return false;
  }
  const at::Tensor& weight = inputs[0].toTensor();
  const PageStorage* storage = StorageTable::instance().find(
      weight.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  if (storage == nullptr || storage->page() != held.accesses[0].page) return false;
  const at::Tensor& indices = inputs[1].toTensor();
  const bool plain = weight.dim() == 2 && weight.is_contiguous() &&
                     weight.itemsize() == held.accesses[0].page->element_size &&
                     indices.defined() && indices.has_storage() &&
                     indices.storage().data() != nullptr &&
                     !indices.unsafeGetTensorImpl()->is_python_dispatch();
  if (!plain) return false;
  pager::Lookup lookup;
  lookup.page = held.accesses[0].page;
  lookup.first = static_cast<std::uint64_t>(weight.storage_offset());
  lookup.width = static_cast<std::uint64_t>(weight.size(1));
  lookup.count = static_cast<std::uint64_t>(indices.numel());
  lookup.rows = [&indices] { return values_of(indices); };
  held.pin = held.pager->look_up(lookup, held.consumer.get());
  return static_cast<bool>(held.pin);
}

/// Brings in the pages of an operator that begins, or denies them to it.
void bring_pages(c10::ArrayRef<const c10::IValue> inputs, const OperatorTraits& traits,
                 OperatorContext& context) {
  const Touching unobserved;
  for (std::size_t i = 0; i < context.held.size(); ++i) {
    Held& held = context.held[i];
    try {
      held.find_consumer();
      if (traits.looks_up && context.held.size() == 1 && look_up(inputs, held)) {
        context.looks_up = looking_up = true;
        break;
      }
      held.touch();
    } catch (...) {
      // A callback may not throw: the storage does it, when the kernel asks it for its bytes. (A
      // kernel that only calls other operators may get through: each of them is observed.)
      held.pager->deny(held.all(), held.client->touch_failed(std::current_exception()));
      context.denied = std::move(held);
      ++denials;
      context.held.resize(i);  // what was pinned before is let go at the end
      break;
    }
  }
}

std::unique_ptr<at::ObserverContext> operator_starts(const at::RecordFunction& function) {
  if (Touching::here() || looking_up) return nullptr;
  BirthScope::operator_starts();  // what was made by the last operator may have become a parameter
  if (observer::no_pages()) return nullptr;
  if (evaluates_node(function)) {
    return Passes::instance().node_begins(function.name() + kEvaluation.size());
  }
  const auto inputs = function.inputs();
  HeldPages pages;
  Unlocked unlocked;  // taken again when nothing else is held
  TableUse use;       // until they are pinned or denied: engines that end wait for that, too
  PageSearch search(use, unlocked);
  search.find(inputs, pages);
  std::unique_ptr<OperatorContext> context;
  if (applies_function(function)) {
    context = std::make_unique<OperatorContext>();
    CustomFunctions::begins({function.threadId(), function.seqNr()});
    context->applies = true;
  }
  if (pages.empty()) return context;
  const OperatorTraits& traits = operator_traits(function);
  if (traits.needs_no_data && !(traits.reads_pointers_on_gpu && on_a_gpu(pages))) return context;
  if (context == nullptr) context = std::make_unique<OperatorContext>();
  for (;;) {
    for (std::size_t i = 0; i < inputs.size() && traits.writes != 0; ++i) {
      if (traits.writes_argument(i)) search.add(inputs[i], true, pages);
    }
    context->held = std::move(pages);
    for (const Held& held : context->held) {
      for (const pager::Access& access : held.accesses) CustomFunctions::uses(*access.page);
    }
    // Most operators are called without it. A custom function, tolist() and a copy of a storage are
    // not, and whoever has what they wait for may need it to go on.
    if (!unlocked) unlocked.emplace();
    bring_pages(inputs, traits, *context);
    if (context->denied || search.is_valid()) break;
    // Another thread has exchanged a storage: what was found may be another tensor's page by now.
    if (std::exchange(context->looks_up, false)) looking_up = false;
    context->held.clear();
    search.start_over();
    search.find(inputs, pages);
  }
  if (trace::on()) context->began = now_ns();
  return context;
}

void operator_ends(const at::RecordFunction& function, at::ObserverContext* context) {
  if (context == nullptr) return;
  if (evaluates_node(function)) return Passes::instance().node_ends(*context);
  auto& ended = static_cast<OperatorContext&>(*context);
  // Whoever has the pager's lock may wait for Python's.
  Unlocked unlocked;
  if (!ended.held.empty() || ended.denied) unlocked.emplace();
  const Nanos end = ended.began != 0 ? now_ns() : 0;
  // First what cannot throw: a page that stays pinned would stay for good.
  if (ended.looks_up) looking_up = false;
  for (Held& held : ended.held) held.pin.release();
  if (ended.denied) {
    ended.denied->pager->allow(ended.denied->all());
    --denials;
  }
  if (ended.applies) CustomFunctions::instance().ends();
  if (ended.began != 0) trace::slice("operator", function.name(), ended.began, end);
}

void before_fork() {
  StorageTable::instance().before_fork();
  ParameterTable::instance().before_fork();
  Passes::instance().before_fork();
  CustomFunctions::instance().before_fork();
}

void after_fork(bool in_child) {
  CustomFunctions::instance().after_fork(in_child);
  Passes::instance().after_fork(in_child);
  ParameterTable::instance().after_fork();
  StorageTable::instance().after_fork();
}

void in_parent() {
  after_fork(false);
}

/// Pages are the parent's: here they throw. The child may have an engine of its own.
void in_child() {
  StorageTable::instance().forget_all([](PageStorage& storage) {
    storage.unbind("this parameter is a page of the parent process: a forked child cannot read it");
  });
  ParameterTable::instance().forget_all([](AttachedParameter&) {});
  TableUse::forget_all();
  TableChange::forget_all();
  after_fork(true);
}

RankedMutex<LockRank::Observer> install_mutex;
std::size_t installed = 0;                       // guarded by install_mutex
std::optional<at::CallbackHandle> installed_as;  // guarded by install_mutex

}  // namespace

namespace observer {

void install() {
  const std::lock_guard lock(install_mutex);
  static const bool watches_fork = pthread_atfork(&before_fork, &in_parent, &in_child) == 0;
  if (!watches_fork) log::warn("torch", "fork cannot be watched: children must not touch pages");
  if (installed++ > 0) return;
  installed_as = at::addGlobalCallback(at::RecordFunctionCallback(&operator_starts, &operator_ends)
                                           .needsInputs(true)
                                           .scopes({at::RecordScope::FUNCTION}));
}

void remove() {
  const std::lock_guard lock(install_mutex);
  if (--installed > 0 || !installed_as) return;
  at::removeCallback(*installed_as);
  installed_as.reset();
}

void require_no_operator(const char* call) {
  PAGODA_REQUIRE(
      !pager::Pager::any_pinned_by_this_thread(),
      "{} was called inside an operator or a custom function that uses a parameter: call "
      "it when that has returned",
      call);
}

bool no_pages() noexcept {
  if (!StorageTable::instance().empty()) return false;
  // While the only page gets another storage there is none for a moment.
  const std::uint64_t moment = TableChange::wait_for_none();
  return StorageTable::instance().empty() && TableChange::none_since(moment);
}

bool is_denying() noexcept {
  return denials > 0;
}

}  // namespace observer

}  // namespace pagoda::torch
