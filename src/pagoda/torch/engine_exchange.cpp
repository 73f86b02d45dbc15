// SPDX-License-Identifier: Apache-2.0
// Parameters that are given another storage (.data =, set_) while they are attached.

#include <algorithm>
#include <mutex>
#include <optional>
#include <span>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/record_function.h>
#include <c10/core/impl/COW.h>
#include <c10/util/SmallVector.h>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/base/out_of_memory.h"
#include "pagoda/torch/engine_impl.h"
#include "pagoda/torch/gradient_hook.h"
#include "pagoda/torch/table_change.h"
#include "pagoda/torch/table_use.h"

namespace pagoda {
namespace {

void require_same_kind(bool same, const std::string& parameter) {
  PAGODA_REQUIRE(
      same,
      "parameter '{}' was given a storage of another size, type or device after attach() (.data =, "
      "set_, to(), half()): release() the model, which keeps the values that it has now, and "
      "attach() it again",
      parameter);
}

constexpr const char* kBeingExchanged =
    "this parameter is being given another storage (.data =, set_)";

/// While it lives, no operator of another thread runs on these pages: those that want one wait, and
/// look then for the pages that their tensors have.
class DeniedToOthers {
 public:
  DeniedToOthers(pager::Pager& pager, std::span<const pager::Access> accesses)
      : pager_(pager), accesses_(accesses.begin(), accesses.end()) {
    pager_.deny({accesses_.data(), accesses_.size()}, kBeingExchanged);
  }
  DeniedToOthers(const DeniedToOthers&) = delete;
  DeniedToOthers& operator=(const DeniedToOthers&) = delete;
  ~DeniedToOthers() { pager_.allow({accesses_.data(), accesses_.size()}); }

 private:
  pager::Pager& pager_;
  const c10::SmallVector<pager::Access, 2> accesses_;
};

}  // namespace

/// The parameter's new storage becomes its page: same state, other bytes.
void Engine::Impl::storage_exchanged(std::size_t index) {
  Parameter& parameter = parameters_[index];
  auto alive = parameter.tensor.lock();
  if (alive == nullptr) return;
  exchange(parameter, at::Tensor(std::move(alive)), true);
}

/// A storage that could be the parameter's page.
void Engine::Impl::require_page_of_its_kind(const Parameter& parameter,
                                            const at::Tensor& tensor) const {
  require_same_kind(tensor.storage().nbytes() == parameter.storage->page()->bytes() &&
                        tensor.scalar_type() == parameter.dtype && tensor.storage_offset() == 0 &&
                        tensor.device() == device(),
                    parameter.name);
}

/// What may become the parameter's page: its own storage of before, or a plain one of that kind.
void Engine::Impl::require_exchangeable(const Parameter& parameter, const at::Tensor& tensor,
                                        const torch::PageStorage* known) const {
  PAGODA_REQUIRE(known == nullptr || known->former(),
                 "parameter '{}' was given the storage of page '{}' (.data =, set_): give it a "
                 "copy of the values (p.data = q.data.clone())",
                 parameter.name, known->page()->name());
  PAGODA_REQUIRE(
      known != nullptr ||
          torch::StorageTable::instance().find(tensor.storage().unsafeGetStorageImpl()) == nullptr,
      "parameter '{}' was given the storage of a parameter of another engine (.data =, set_): give "
      "it a copy of the values (p.data = q.data.clone())",
      parameter.name);
  PAGODA_REQUIRE(
      known != nullptr || !torch::PageStorage::lost(tensor.storage()),
      "parameter '{}' was given a storage (.data =, set_) that was a page, and went with "
      "its engine or when its model was released: give it a copy (p.data.clone()) that "
      "you have kept",
      parameter.name);
  const pager::Page& page = *parameter.storage->page();
  const std::vector<std::size_t>& sharing = of_page_.at(&page);
  PAGODA_REQUIRE(
      sharing.size() == 1,
      "parameter '{}' was given another storage (.data =, set_), and has shared one with "
      "{} other{} since attach(): copy the values into it (p.data.copy_(…)), or "
      "release() the model and attach() it again",
      parameter.name, sharing.size() - 1, sharing.size() == 2 ? "" : "s");
  require_page_of_its_kind(parameter, tensor);
  const auto pinned = [this](const pager::Page& one) {
    return runtime_->pager().look(one).holds > 0;
  };
  PAGODA_REQUIRE(!pinned(page) && (known == nullptr || !pinned(*known->page())),
                 "parameter '{}' was given another storage (.data =, set_) and is pinned, so "
                 "raw pointers to its values are in use: release the pin before it gets another "
                 "storage",
                 parameter.name);
}

/// The parameter has the tensor's storage from now on, with that one's values or its own. Whoever
/// still refers to the storage that it had sees there what it saw before, as with plain tensors.
///
/// One at a time; operators of two threads may meet the storage at once, and the second finds a
/// page. Whoever waits for that may be inside an operator that has pages, so nobody waits for room
/// meanwhile: the pages are brought in and pinned before. See docs/notes/threads.md.
void Engine::Impl::exchange(Parameter& parameter, const at::Tensor& tensor, bool with_values) {
  const at::DisableRecordFunctionGuard unseen;
  torch::TableUse use;  // of the storage that is found, until all is over
  (void)use.enter();
  torch::PageStorage* brought = nullptr;
  at::Tensor copied;  // what `brought` has, where the device has no room for both pages
  c10::SmallVector<pager::Access, 2> accesses;
  StoragePtr was;  // like its memory it goes after the lock: it may be Python's
  c10::DataPtr replaced;
  pager::Pin pin;  // of `accesses`
  std::optional<DeniedToOthers>
      denied;         // ends first: what lives on the device stays readable by its pointer
  c10::Storage shut;  // in a capture, and goes after the lock
  for (;;) {
    {
      const std::lock_guard one_at_a_time(exchange_mutex_);
      shut = std::exchange(parameter.shut, c10::Storage());
      if (shut) torch::PageStorage::open_plain(*shut.unsafeGetStorageImpl());
      torch::PageStorage* const known = find(tensor);
      if (known == parameter.storage) return;
      PAGODA_REQUIRE(may_exchange_,
                     "parameter '{}' was given another storage (.data =, set_) while its model is "
                     "released, which keeps the values that it has now",
                     parameter.name);
      require_exchangeable(parameter, tensor, known);
      if (pin && known == brought) {
        follow_layout(parameter, tensor);
        const void* values = nullptr;
        if (with_values) {
          values = known == nullptr   ? tensor.storage().data()
                   : copied.defined() ? copied.const_data_ptr()
                                      : known->key()->mutable_data();
        }
        was = parameter.storage->lock();
        replaced = exchange_pinned(parameter, tensor, values, was);
        break;
      }
      denied.reset();
      pin.release();
      brought = known;
      copied.reset();
      accesses.assign(1, {parameter.storage->page(), false});
      if (known != nullptr && with_values) accesses.push_back({known->page(), false});
    }
    if (const auto stream = consumer()) {
      if (stream->capturing()) refuse_in_capture(parameter, tensor);
      stream->synchronize();
    }
    denied.emplace(runtime_->pager(), std::span<const pager::Access>(accesses));
    try {
      pin = runtime_->pager().touch({accesses.data(), accesses.size()}, 0, nullptr);
    } catch (const UserError&) {
      if (accesses.size() == 1) throw;
      copied = returning_values(parameter, *brought);
      accesses.pop_back();
      pin = runtime_->pager().touch({accesses.data(), accesses.size()}, 0, nullptr);
    }
  }
  denied.reset();
  pin.release();
  drop_unused();
}

/// A graph would read the plain storage for ever: until it is the parameter's page whoever asks it,
/// and its views, gets an error.
void Engine::Impl::refuse_in_capture(Parameter& parameter, const at::Tensor& tensor) {
  const std::string why = fmt::format(
      "parameter '{}' was given another storage (.data =, set_) and is used first while a CUDA "
      "graph is captured: run an operator on it before that",
      parameter.name);
  const std::lock_guard one_at_a_time(exchange_mutex_);
  if (find(tensor) == nullptr && !parameter.shut) {
    parameter.shut = tensor.storage();
    torch::PageStorage::shut_plain(*tensor.storage().unsafeGetStorageImpl(), why);
  }
  throw UserError(why);
}

/// A copy of what the parameter had before, and gets back, without its page.
at::Tensor Engine::Impl::returning_values(const Parameter& parameter, torch::PageStorage& storage) {
  try {
    return bytes_of(storage).to(device());
  } catch (const c10::Error& error) {
    throw OutOfMemory(
        fmt::format("there is no memory to copy what parameter '{}' is given (.data =): {}",
                    parameter.name, error.what_without_backtrace()));
  }
}

/// `values`: what the parameter has from now on; null: what it has. Its page is pinned. Returns the
/// memory that nobody needs any more.
c10::DataPtr Engine::Impl::exchange_pinned(Parameter& parameter, const at::Tensor& tensor,
                                           const void* values, const StoragePtr& was) {
  log::info("torch", "a parameter's storage was exchanged", {{"parameter", parameter.name}});
  Former former = keep_former(parameter, was);
  try {
    if (values != nullptr) {
      runtime_->pager().overwrite(*parameter.storage->page(),
                                  static_cast<const std::byte*>(values));
    }
  } catch (...) {
    if (former.page != nullptr) runtime_->pager().drop(*former.page);
    throw;
  }
  return take_storage(parameter, tensor, std::move(former), was);
}

/// What the parameter's present storage has, for others that refer to it: a page more. Where the
/// budgets have no room for one, a plain copy, as the storage would be without an engine; and one
/// in its own memory, where that was kept.
Engine::Impl::Former Engine::Impl::keep_former(const Parameter& parameter, const StoragePtr& was) {
  if (was == nullptr) return {};
  pager::Page& page = *parameter.storage->page();
  if (runtime_->config().parameters != Placement::Device &&
      runtime_->pager().has_room_beside(page)) {
    runtime_->pager().wait_for_writes(page);
    try {
      return {&make_page(page.name() + ", before .data =", page.elements, page.element_size,
                         was->data(), device()),
              {}};
    } catch (const BudgetExceeded&) {
    } catch (const OutOfMemory&) {
    }
  }
  try {
    return {nullptr, copy_of(*parameter.storage).data};
  } catch (const c10::Error& error) {
    throw OutOfMemory(fmt::format(
        "there is no memory to keep what the previous storage of parameter '{}' has, to which "
        "something still refers ({}): drop it before the parameter gets another one (.data =)",
        parameter.name, error.what_without_backtrace()));
  }
}

/// The page of a storage that a parameter had and has got back. Returns the memory that was kept
/// for the storage.
c10::DataPtr Engine::Impl::retire_former(const c10::Storage& storage) {
  torch::PageStorage* const known = storages_.find(storage.unsafeGetStorageImpl());
  if (known == nullptr) return {};
  storages_.retire(known->key(), known->page());
  known->end();
  runtime_->pager().set_binding(*known->page(), nullptr);
  c10::DataPtr kept = known->take_kept_memory();
  known->detach(kBeingExchanged);
  return kept;
}

/// In a call of the engine: operators of this thread may exchange storages, and cannot wait for
/// others that have found the previous ones.
void Engine::Impl::drop_retired() {
  // Inside an operator that has pages: others may wait for their room while they use the tables.
  if (pager::Pager::any_pinned_by_this_thread()) return;
  const auto retired = storages_.take_retired();
  auto pages = storages_.take_dropped();
  if (retired.empty() && pages.empty()) return;
  torch::TableUse::wait_for_all();
  drop_unless_held(std::move(pages));
  sweep();
}

/// A pin that was taken of one of them meanwhile keeps it.
void Engine::Impl::drop_unless_held(std::vector<pager::Page*> pages) {
  std::erase_if(pages, [this](pager::Page* page) {
    if (!runtime_->pager().is_unused(*page)) return false;
    runtime_->pager().drop(*page);
    return true;
  });
  storages_.keep_dropped(std::move(pages));
}

/// The same for an operator's thread, which cannot wait: the pages that nobody uses any more. A
/// loop that only swaps weights and evaluates never comes to step(), and what each
/// swap leaves would fill the budget.
void Engine::Impl::drop_unused() {
  if (closing_.load() || torch::observer::is_denying()) return;
  {
    const std::lock_guard lock(calls_mutex_);
    if (calling_ != nullptr) return;
  }
  drop_unless_held(storages_.take_unused());
}

/// The storages that parameters have now are given back: until this goes, none is exchanged.
Engine::Impl::NoExchanges::NoExchanges(Impl& engine) : engine_(engine) {
  const std::lock_guard one_at_a_time(engine_.exchange_mutex_);
  engine_.may_exchange_ = false;
}

Engine::Impl::NoExchanges::~NoExchanges() {
  const std::lock_guard one_at_a_time(engine_.exchange_mutex_);
  engine_.may_exchange_ = true;
}

/// What storages had before they became pages, and nothing can point at any more.
void Engine::Impl::drop_kept_memory() {
  std::vector<c10::DataPtr> dropped;  // after the lock
  const std::lock_guard one_at_a_time(exchange_mutex_);
  for (const Parameter& parameter : parameters_) {
    torch::PageStorage& storage = *parameter.storage;
    if (storage.kept_memory() == nullptr || storage.has_views()) continue;
    dropped.push_back(storage.take_kept_memory());
  }
}

/// The tensor's storage is the parameter's page from now on, in place of the one that was. Returns
/// what it had as a plain one, unless others refer to it: numpy arrays may point there.
c10::DataPtr Engine::Impl::take_storage(Parameter& parameter, const at::Tensor& tensor,
                                        Former former, const StoragePtr& was) {
  const torch::TableChange change;
  c10::DataPtr kept = retire_former(tensor.storage());
  pager::Page& page = *parameter.storage->page();
  torch::PageStorage* const old = parameter.storage;
  storages_.retire(old->key(), nullptr);
  old->end();  // from here on its death, which may be under way, is not the page's
  runtime_->pager().set_binding(page, nullptr);  // an eviction must not meet it half undone
  c10::DataPtr kept_of_old;
  if (former.page != nullptr) kept_of_old = old->take_kept_memory();
  if (former.plain) {
    old->give_back(std::move(*former.plain));
  } else {
    old->detach(
        "this storage was a parameter's, which has been given another one (.data =, set_): keep a "
        "copy (p.data.clone())");
  }
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  // Before the pointer goes: operators of other threads may be about to ask for it.
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(
      "this storage has just become a parameter's (.data =, set_)");
  c10::DataPtr had = std::move(storage._mutable_data_ptr_no_checks());
  storage.set_data_ptr_noswap(c10::DataPtr(nullptr, tensor.device()));
  parameter.storage = &make_storage(tensor.storage(), page, false);
  parameter.storage->add_parameter(tensor);
  if (had && parameter.storage->has_views() && !c10::impl::cow::is_cow_data_ptr(had)) {
    kept = std::move(had);
  }
  parameter.storage->keep_memory(std::move(kept));
  if (former.page != nullptr) {
    make_storage(c10::Storage(was), *former.page, true).keep_memory(std::move(kept_of_old));
  }
  return had;
}

/// Gradients and state lie in the order of the storage: another one is for before there are any.
void Engine::Impl::require_layout(const Parameter& parameter, const at::Tensor& tensor) const {
  PAGODA_REQUIRE(
      tensor.strides() == c10::IntArrayRef(parameter.strides) || (!stepped_ && !parameter.given),
      "parameter '{}' was given another memory layout after the first step "
      "(to(memory_format=…), .data = p.data.t()): do that before attach(), or "
      "release() the model and attach() it again",
      parameter.name);
}

void Engine::Impl::follow_layout(Parameter& parameter, const at::Tensor& tensor) const {
  require_layout(parameter, tensor);
  parameter.strides = tensor.strides().vec();
}

/// storage_exchanged() for a call that can report it: values that may not be written now are
/// dropped, and the call after that goes on with those of before. Returns why, or nothing.
std::string Engine::Impl::take_new_values(std::size_t index, const at::Tensor& tensor) {
  try {
    storage_exchanged(index);
  } catch (const engine::RefusedInWindow& refused) {
    exchange(parameters_[index], tensor, false);
    return refused.what();
  }
  return {};
}

/// All parameters that a pass may reach have what check_parameter() says. Where values are dropped
/// it throws for all of them at once: model.half() and to() exchange the storages of all.
void Engine::Impl::check_parameters() {
  std::vector<std::size_t> dropped;
  std::string why;  // the first of them was
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const auto tensor = reachable(parameters_[i]);
    if (!tensor) continue;
    try {
      const std::string refused = check_parameter(i, *tensor);
      if (refused.empty()) continue;
      if (dropped.empty()) why = refused;
      dropped.push_back(i);
    } catch (const UserError&) {  // the next call meets it again; what was dropped is told now
      if (dropped.empty()) throw;
      break;
    }
  }
  if (dropped.empty()) return;
  if (dropped.size() == 1) {
    throw UserError(fmt::format(
        "{}. What the parameter was given (.data =, set_) is dropped: it keeps its previous values",
        why));
  }
  constexpr std::size_t kMostNames = 5;
  std::string names;
  for (const std::size_t index : std::span(dropped).first(std::min(dropped.size(), kMostNames))) {
    names += fmt::format("{}'{}'", names.empty() ? "" : ", ", parameters_[index].name);
  }
  if (dropped.size() > kMostNames) {
    names += fmt::format(" and {} more", dropped.size() - kMostNames);
  }
  throw UserError(
      fmt::format("{}. What {} parameters were given (.data =, set_) is dropped: they keep their "
                  "previous values ({})",
                  why, dropped.size(), names));
}

/// The parameter has its hooks, its page and its layout, or gets them back. Returns why the values
/// of a storage that it was given are dropped, or nothing.
std::string Engine::Impl::check_parameter(std::size_t index, const at::Tensor& tensor) {
  Parameter& parameter = parameters_[index];
  // torch has one slot for a hook that sees accumulated gradients: one that the user has set after
  // attach() took ours away, and is called before it from now on. Gradients that came meanwhile are
  // in p.grad, and step() takes them from there.
  if (torch::hook_of(tensor) != parameter.hook) set_hook(index, tensor);
  torch::keep_gradient_hook(tensor);
  const c10::Storage& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  std::string dropped;
  if (storage.unsafeGetStorageImpl() != parameter.storage->key()) {
    // No operator has used it since, or it was refused there.
    dropped = take_new_values(index, tensor);
  }
  follow_layout(parameter, tensor);
  require_same_kind(tensor.scalar_type() == parameter.dtype, parameter.name);
  PAGODA_REQUIRE(!parameter.storage->replaced(),
                 "the memory of parameter '{}' was exchanged under it (share_memory_(), or an "
                 "extension): share a copy of the model, or release() it first",
                 parameter.name);
  return dropped;
}

}  // namespace pagoda
