// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/observer.h"

#include <cstdint>
#include <cstring>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
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
#include "pagoda/torch/autograd_state.h"
#include "pagoda/torch/birth_scope.h"
#include "pagoda/torch/custom_functions.h"
#include "pagoda/torch/interpreter_lock.h"
#include "pagoda/torch/operator_traits.h"
#include "pagoda/torch/page_storage.h"
#include "pagoda/torch/passes.h"
#include "pagoda/torch/sparse_parts.h"
#include "pagoda/torch/storage_table.h"
#include "pagoda/torch/table_change.h"
#include "pagoda/torch/table_use.h"

namespace pagoda::torch {

/// What an operator holds between its start and its end, with one engine.
struct Held {
  pager::Pager* pager = nullptr;
  ObserverClient* client = nullptr;
  std::shared_ptr<device::Stream> consumer;
  c10::SmallVector<pager::Access, 4> accesses;
  pager::Pin pin;  // of `accesses`, which stay in their place from then on

  std::span<const pager::Access> all() const { return {accesses.data(), accesses.size()}; }
};

/// One entry, unless an operator mixes engines. Small ones need no allocation.
using HeldPages = c10::SmallVector<Held, 1>;

namespace {

thread_local bool touching = false;    // this thread brings an operator's pages in
thread_local bool looking_up = false;  // its operator reads rows in place
thread_local int denials = 0;          // operators of this thread that are about to throw

struct OperatorContext final : at::ObserverContext {
  HeldPages held;
  std::optional<Held> denied;  // its touch failed: the operator throws when it asks for them
  bool looks_up = false;       // …rows of its one page, in place
  bool applies = false;        // it is the forward of a custom autograd function
  Nanos began = 0;             // with its pages there; 0: not traced
};

void note(PageStorage& storage, bool write, HeldPages& held) {
  Held* mine = nullptr;
  for (Held& one : held) {
    if (one.pager == &storage.pager()) mine = &one;
  }
  if (mine == nullptr) {
    held.push_back({&storage.pager(), &storage.client(), nullptr, {}, {}});
    mine = &held.back();
  }
  for (pager::Access& access : mine->accesses) {
    if (access.page != storage.page()) continue;
    access.write = access.write || write;
    return;
  }
  mine->accesses.push_back({storage.page(), write});
}

/// Lets go of Python's lock, for what may wait.
using Unlocked = std::optional<WithoutInterpreterLock>;

/// The search for the pages of an operator's arguments.
struct PageSearch {
  TableUse& use;  // what is found can be used until it is pinned, or this ends
  Unlocked& unlocked;
  /// A parameter got another page on the way: what was found before may be that one, by the storage
  /// that it had. All are to be looked for again.
  bool found_new_storage = false;
  bool may_exchange = true;
  std::uint64_t began = 0;  // the moment (TableChange)

  /// Finds what `look` looks for, all of one moment.
  template <class Look>
  void run(const Look& look) {
    do {
      found_new_storage = false;
      began = TableChange::wait_for_none();
      look();
    } while (found_new_storage || !is_valid());
  }
  bool is_valid() const noexcept { return TableChange::none_since(began); }
};

/// A leaf whose storage is no parameter's page: if it is a parameter of an engine, it was given
/// another storage, which becomes its page.
void readopt(const at::Tensor& tensor, PageSearch& search) noexcept {
  const auto find = [&] { return ParameterTable::instance().find(tensor.unsafeGetTensorImpl()); };
  const AttachedParameter* parameter = find();
  if (parameter != nullptr && search.use.enter()) parameter = find();
  if (parameter == nullptr) return;
  if (!search.unlocked) search.unlocked.emplace();
  try {
    parameter->client->storage_exchanged(parameter->number);
    search.found_new_storage = true;
  } catch (...) {
    parameter->client->touch_failed(std::current_exception());
  }
}

PageStorage* page_of(const at::Tensor& tensor, PageSearch& search) {
  const auto find = [&] {
    return StorageTable::instance().find(
        tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  };
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  PageStorage* page = find();
  if (page != nullptr && search.use.enter()) page = find();
  // A parameter has hooks, also while it is frozen; what operators make under no_grad has nothing.
  if ((page != nullptr && !page->former()) || !search.may_exchange ||
      tensor.unsafeGetTensorImpl()->autograd_meta() == nullptr || !tensor.is_leaf()) {
    return page;
  }
  readopt(tensor, search);
  page = find();
  return page != nullptr && search.use.enter() ? find() : page;
}

/// Notes the pages of an argument. Every operator pays for this one.
void note_pages(const c10::IValue& value, bool write, HeldPages& held, PageSearch& search) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (PageStorage* page = page_of(tensor, search)) note(*page, write, held);
    if (!tensor.defined() || tensor.has_storage()) return;
    for (const at::Tensor& part : sparse_parts(tensor)) {
      if (PageStorage* page = page_of(part, search)) note(*page, write, held);
    }
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) note_pages(element, write, held, search);
  } else if (value.isTuple()) {
    for (const c10::IValue& element : value.toTupleRef().elements()) {
      note_pages(element, write, held, search);
    }
  }
}

/// …of all of them.
void note_pages(c10::ArrayRef<const c10::IValue> inputs, HeldPages& held, PageSearch& search) {
  search.run([&] {
    held.clear();
    for (const c10::IValue& input : inputs) note_pages(input, false, held, search);
  });
  search.may_exchange = false;
}

/// A tensor of a kernel that brings its pages in by itself, and whether the kernel writes to it.
using AddedTensor = std::pair<at::Tensor, bool>;

/// …of its tensors from `first` on; of all if anything was exchanged since `found`.
void find_added_pages(std::span<const AddedTensor> added, std::size_t first, std::uint64_t found,
                      HeldPages& held, PageSearch& search) {
  search.run([&] {
    if (search.began != found) first = 0;
    if (first == 0) held.clear();
    for (const auto& [tensor, write] : added.subspan(first)) {
      PageStorage* page = page_of(tensor, search);
      if (page == nullptr) continue;
      note(*page, write, held);
      CustomFunctions::uses(*page->page());
    }
    if (search.found_new_storage) first = 0;
  });
}

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

std::uint8_t touch_mode() {
  return static_cast<std::uint8_t>((at::GradMode::is_enabled() ? 1U : 0U) |
                                   (in_backward() ? 2U : 0U));
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

/// While one lives, what this thread's operators do is not observed: a touch runs some. Not a
/// RecordFunctionGuard: every change of that rebuilds torch's list of callbacks, which costs more
/// than the touch.
class Touching {
 public:
  Touching() { touching = true; }
  Touching(const Touching&) = delete;
  Touching& operator=(const Touching&) = delete;
  ~Touching() { touching = false; }
};

/// Brings in the pages of an operator that begins, or denies them to it.
void bring_pages(c10::ArrayRef<const c10::IValue> inputs, const OperatorTraits& traits,
                 OperatorContext& context) {
  const Touching unobserved;
  for (std::size_t i = 0; i < context.held.size(); ++i) {
    Held& held = context.held[i];
    try {
      held.consumer = held.client->consumer();
      if (traits.looks_up && context.held.size() == 1 && look_up(inputs, held)) {
        context.looks_up = looking_up = true;
        break;
      }
      held.pin = held.pager->touch(held.all(), touch_mode(), held.consumer.get());
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
  if (touching || looking_up) return nullptr;
  BirthScope::operator_starts();  // what was made by the last operator may have become a parameter
  if (observer::no_pages()) return nullptr;
  if (evaluates_node(function)) {
    return Passes::instance().node_begins(function.name() + kEvaluation.size());
  }
  const auto inputs = function.inputs();
  HeldPages pages;
  Unlocked unlocked;  // taken again when nothing else is held
  TableUse use;       // until they are pinned or denied: engines that end wait for that, too
  PageSearch search{use, unlocked};
  note_pages(inputs, pages, search);
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
      if (traits.writes_argument(i)) note_pages(inputs[i], true, pages, search);
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
    search.may_exchange = true;
    note_pages(inputs, pages, search);
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

struct KernelPages::State {
  HeldPages pages;
  TableUse use;                                        // until touch()
  std::uint64_t found = TableChange::wait_for_none();  // when `pages` were
  c10::SmallVector<AddedTensor, 8> added;              // also plain ones: they may become pages

  /// Finds those of what was added from `first` on, and of all if there was an exchange since.
  void find_pages(std::size_t first) {
    Unlocked unlocked;  // kernels are called without it as it is
    PageSearch search{use, unlocked};
    find_added_pages({added.data(), added.size()}, first, found, pages, search);
    found = search.began;
  }

  std::optional<std::string> bring() {
    const Touching unobserved;
    for (Held& held : pages) {
      try {
        held.consumer = held.client->consumer();
        held.pin = held.pager->touch(held.all(), touch_mode(), held.consumer.get());
      } catch (const pager::OperatorTooLarge& error) {
        return error.what();
      } catch (...) {
        throw std::runtime_error(held.client->touch_failed(std::current_exception()));
      }
    }
    return std::nullopt;
  }
};

KernelPages::KernelPages() : state_(std::make_unique<State>()) {}

KernelPages::~KernelPages() = default;

void KernelPages::add(const at::Tensor& tensor, bool write) {
  state_->added.emplace_back(tensor, write);
  state_->find_pages(state_->added.size() - 1);
}

bool KernelPages::empty() const noexcept {
  return state_->pages.empty();
}

Bytes KernelPages::needed() const {
  Bytes sum = 0;
  for (const Held& held : state_->pages) sum += held.pager->needed(held.all());
  return sum;
}

Bytes KernelPages::room() const {
  Bytes least = ~Bytes{0};
  for (const Held& held : state_->pages) {
    least = std::min(least, held.pager->tiers().arena().stats().capacity);
  }
  return least;
}

std::optional<std::string> KernelPages::touch() {
  for (;;) {
    if (auto too_large = state_->bring()) return too_large;
    if (TableChange::none_since(state_->found)) break;
    state_->find_pages(0);  // another thread has exchanged a storage
  }
  state_->use.leave();
  state_->added.clear();
  return std::nullopt;
}

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
