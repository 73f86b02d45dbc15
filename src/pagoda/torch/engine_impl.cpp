// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/engine_impl.h"

#include <algorithm>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/base/out_of_memory.h"
#include "pagoda/engine/backend.h"
#include "pagoda/io/io_error.h"
#include "pagoda/io/owner_process.h"
#include "pagoda/torch/activation_store.h"
#include "pagoda/torch/cuda_library.h"
#include "pagoda/torch/cuda_memory.h"
#include "pagoda/torch/gradient_hook.h"
#include "pagoda/torch/list_operators.h"
#include "pagoda/torch/pageable.h"
#include "pagoda/torch/storage_table.h"
#include "pagoda/torch/table_use.h"
#include "pagoda/torch/value_lists.h"

namespace pagoda {

Engine::Impl::Impl(const Config& config, std::shared_ptr<comm::World> world)
    : runtime_(std::make_unique<engine::Runtime>(config, std::move(world))) {
  if (runtime_->device().kind() == device::DeviceKind::Cuda) {
    torch::load_cuda();
  } else {
    large_blocks_.emplace();  // gradients and activations are the host's
  }
  if (const auto limit = runtime_->config().device_limit) limit_device(*limit);
  torch::list_operators::install(device().type());
  torch::value_lists::install();
  torch::observer::install();
}

Engine::Impl::~Impl() {
  pass_events_->end();
  activation_pool_.reset();
  activations_.reset();
  forget_parameters();
  if (std::uncaught_exceptions() > 0 && !runtime_->failed() && runtime_->ranks() > 1) {
    // The other ranks shall not wait for one that is on its way out.
    runtime_->fail(std::make_exception_ptr(EngineError("it ended with an exception")));
  }
  for (auto& [key, storage] : storages_) torch::StorageTable::instance().erase(storage->key());
  runtime_->end_waits();  // for a page, an update or another rank
  torch::TableUse::wait_for_all();
  torch::observer::remove();
  for (auto& [key, storage] : storages_) {
    // The page of a storage that has died may be gone.
    if (storage->alive() && storage->page() != nullptr)
      runtime_->pager().set_binding(*storage->page(), nullptr);
  }
  // Storages go on dying, where others than this thread have them.
  for (auto& [key, storage] : storages_) storage->end();
  runtime_.reset();
  storages_.clear();
}

/// What the limit leaves beside the pages' arena is torch's: activations, workspaces, gradients.
void Engine::Impl::limit_device(Bytes limit) {
  if (runtime_->device().kind() != device::DeviceKind::Cuda) {
    log::warn("torch", "device_limit has no effect: torch counts its memory on CUDA devices only");
    return;
  }
  const Bytes pages = runtime_->tiers().arena().stats().capacity;
  PAGODA_REQUIRE(limit > pages, "device_limit ({}) leaves nothing beside the pages' {}",
                 format_bytes(limit), format_bytes(pages));
  limit_ =
      torch::limit_cuda_memory(device(), limit - pages, runtime_->device().memory_info().total);
}

const std::shared_ptr<torch::ActivationStore>& Engine::Impl::activations() {
  if (activations_ == nullptr) {
    activation_pool_ = std::make_unique<ThreadPool>(1, "activations");
    activations_ = std::make_shared<torch::ActivationStore>(
        runtime_->tiers(), *activation_pool_, device(), [this] { return consumer(); });
  }
  return activations_;
}

std::string Engine::Impl::touch_failed(std::exception_ptr error) noexcept {
  // The caller's mistake, or memory that ran out, leaves all pages where they were.
  if (!runtime_->failed()) {
    try {
      std::rethrow_exception(error);
    } catch (const UserError& mistake) {
      return mistake.what();
    } catch (const OutOfMemory& memory) {
      return memory.what();
    } catch (const std::bad_alloc&) {
      return "host memory ran out while the pages of an operator were brought in";
    } catch (...) {
      runtime_->fail(std::current_exception());
    }
  }
  try {
    runtime_->check();
  } catch (const std::exception& cause) {  // the first error: with its page, path and errno
    return cause.what();
  }
  return "the engine has failed";
}

c10::Device Engine::Impl::device() const {
  const device::Device& device = runtime_->device();
  if (device.kind() != device::DeviceKind::Cuda) return c10::Device(c10::kCPU);
  const std::string& word = runtime_->config().device;
  const auto colon = word.find(':');
  return c10::Device(c10::kCUDA,
                     static_cast<c10::DeviceIndex>(
                         colon == std::string::npos ? 0 : std::stoi(word.substr(colon + 1))));
}

std::shared_ptr<device::Stream> Engine::Impl::consumer() {
  if (runtime_->device().kind() != device::DeviceKind::Cuda) return nullptr;
  const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
  void* native = guard.getStream(device()).native_handle();
  const std::lock_guard lock(stream_mutex_);
  auto& stream = streams_[native];
  if (stream == nullptr) stream = runtime_->device().wrap_stream(native, "torch");
  return stream;
}

torch::PageStorage* Engine::Impl::find(const at::Tensor& tensor) const {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  const auto found = storages_.find(tensor.storage().unsafeGetStorageImpl());
  return found == storages_.end() ? nullptr : found->second.get();
}

void Engine::Impl::require_ours_or_nobodys(const at::Tensor& tensor,
                                           const std::string& name) const {
  const auto* key = tensor.storage().unsafeGetStorageImpl();
  PAGODA_REQUIRE(torch::StorageTable::instance().find(key) == nullptr || find(tensor) != nullptr,
                 "parameter '{}' belongs to another engine: call release() of that engine first",
                 name);
}

/// The same sizes over a storage on that device.
void Engine::Impl::point_at(at::Tensor& tensor, const c10::Storage& storage, c10::Device device) {
  at::Tensor there = at::empty({0}, tensor.options().device(device));
  there.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  there.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                     tensor.storage_offset());
  tensor.set_data(there);
}

torch::PageStorage& Engine::Impl::adopt(const at::Tensor& tensor, const std::string& name) {
  sweep();
  if (torch::PageStorage* known = find(tensor)) return *known;
  torch::require_pageable(tensor, name, device());
  // A view of a storage that has moved to the engine's device already follows it there.
  const auto moved = moved_.find(tensor.storage().unsafeGetStorageImpl());
  if (moved != moved_.end()) {
    if (auto there = moved->second.to.lock(); there != nullptr && !moved->second.from.expired()) {
      const at::DisableRecordFunctionGuard unseen;
      at::Tensor here = tensor;
      point_at(here, c10::Storage(std::move(there)), device());
      return *find(here);
    }
    moved_.erase(moved);
  }
  require_ours_or_nobodys(tensor, name);
  const at::DisableRecordFunctionGuard unseen;
  const Bytes size = tensor.element_size();
  const Bytes bytes = tensor.storage().nbytes();
  PAGODA_REQUIRE_EQ(bytes % size, 0U, "the storage of '{}' is no whole number of elements", name);
  std::string known_as = name.empty() ? fmt::format("parameter {}", births_) : name;
  ++births_;
  if (!tensor.device().is_cpu()) consumer()->synchronize();
  pager::Page& page =
      make_page(std::move(known_as), bytes / size, size, tensor.storage().data(), tensor.device());
  at::Tensor here = tensor;
  if (tensor.device() != device()) {
    c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(nullptr, device()),
                         nullptr, false);
    moved_.insert_or_assign(
        tensor.storage().unsafeGetStorageImpl(),
        Moved{tensor.storage().getWeakStorageImpl(), storage.getWeakStorageImpl()});
    point_at(here, storage, device());
  }
  return make_storage(here.storage(), page);
}

/// A page with the bytes at `data`, kept where parameters are.
pager::Page& Engine::Impl::make_page(std::string name, std::uint64_t elements, Bytes element_size,
                                     const void* data, c10::Device from) {
  try {
    return runtime_->pager().adopt(
        std::move(name), elements, element_size,
        engine::pager_placement(runtime_->config().parameters), static_cast<const std::byte*>(data),
        from.is_cpu() ? device::Direction::HostToHost : device::Direction::DeviceToHost);
  } catch (const io::IoError&) {  // it has other pages, too: later calls shall say so
    runtime_->fail(std::current_exception());
    throw;
  }
}

/// The storage's bytes are the page's from now on.
torch::PageStorage& Engine::Impl::make_storage(const c10::Storage& storage, pager::Page& page) {
  auto made = std::make_unique<torch::PageStorage>(storage, runtime_->pager(), *this);
  torch::PageStorage& out = *made;
  out.watch(page);
  runtime_->pager().set_binding(page, &out);
  storages_[out.key()] = std::move(made);
  torch::StorageTable::instance().insert(out.key(), out);
  return out;
}

/// The parameter's new storage becomes its page: same state, other bytes.
void Engine::Impl::storage_exchanged(std::size_t index) {
  Parameter& parameter = parameters_[index];
  auto alive = parameter.tensor.lock();
  if (alive == nullptr) return;
  const at::Tensor tensor(std::move(alive));
  const torch::PageStorage* known = find(tensor);
  if (known == parameter.storage) return;
  PAGODA_REQUIRE(known == nullptr || known->former(),
                 "parameter '{}' was given the storage of page '{}' (.data =, set_): give it a "
                 "copy of the values (p.data = q.data.clone())",
                 parameter.name, known->page()->name());
  PAGODA_REQUIRE(known != nullptr || !torch::PageStorage::lost(tensor.storage()),
                 "parameter '{}' was given a storage back (.data =, set_) whose values could not "
                 "be kept for lack of memory: give it a copy (p.data.clone()) that you have kept",
                 parameter.name);
  const pager::Page& page = *parameter.storage->page();
  const at::DisableRecordFunctionGuard unseen;
  PAGODA_REQUIRE(
      of_page_[&page].size() == 1 && tensor.storage().nbytes() == page.bytes() &&
          static_cast<Bytes>(tensor.element_size()) == page.element_size &&
          tensor.storage_offset() == 0 && tensor.device() == device(),
      "parameter '{}' was given a storage of another size, type or device after attach() (.data =, "
      "set_, to(), half()): release() the model, which keeps the values that it has now, and "
      "attach() it again",
      parameter.name);
  follow_layout(parameter, tensor);
  log::info("torch", "a parameter's storage was exchanged", {{"parameter", parameter.name}});
  exchange(parameter, tensor, true);
}

/// The parameter has the tensor's storage from now on, with that one's values or its own. Whoever
/// still refers to the storage that it had sees there what it saw before, as with plain tensors.
void Engine::Impl::exchange(Parameter& parameter, const at::Tensor& tensor, bool with_values) {
  if (const auto stream = consumer()) stream->synchronize();
  pager::Page* const former = keep_former(parameter);
  try {
    if (with_values) {
      torch::PageStorage* known = find(tensor);
      const at::Tensor copy = known == nullptr ? at::Tensor() : bytes_of(*known).to(device());
      const void* data = known == nullptr ? tensor.storage().data() : copy.const_data_ptr();
      runtime_->pager().overwrite(*parameter.storage->page(), static_cast<const std::byte*>(data));
    }
  } catch (...) {
    if (former != nullptr) runtime_->pager().drop(*former);
    throw;
  }
  take_storage(parameter, tensor, former);
}

/// A page for what the parameter's present storage has, if somebody else refers to it. Null where
/// nobody does, or no memory is left for it.
pager::Page* Engine::Impl::keep_former(const Parameter& parameter) {
  const auto storage = parameter.storage->lock();
  if (storage == nullptr) return nullptr;
  pager::Page& page = *parameter.storage->page();
  const pager::Access access{&page, false};
  const pager::Pin pin = runtime_->pager().touch({&access, 1}, 0, nullptr);
  try {
    return &make_page(page.name() + ", before .data =", page.elements, page.element_size,
                      storage->data(), device());
  } catch (const BudgetExceeded& full) {
    log::warn("torch", "the values of an exchanged storage could not be kept",
              {{"parameter", parameter.name}, {"cause", full.what()}});
    return nullptr;
  } catch (const OutOfMemory&) {
    return nullptr;
  }
}

/// The page of a storage that a parameter had and has got back.
void Engine::Impl::retire_former(const c10::Storage& storage) {
  const auto found = storages_.find(storage.unsafeGetStorageImpl());
  if (found == storages_.end()) return;
  torch::StorageTable::instance().erase(found->first);
  retired_pages_.push_back(found->second->page());
  runtime_->pager().set_binding(*found->second->page(), nullptr);
  found->second->detach();
  retired_.push_back(std::move(found->second));
  storages_.erase(found);
}

/// In a call of the engine: operators of this thread may exchange storages, and cannot wait for
/// others that have found the previous ones.
void Engine::Impl::drop_retired() {
  if (retired_.empty()) return;
  torch::TableUse::wait_for_all();
  for (pager::Page* page : std::exchange(retired_pages_, {})) runtime_->pager().drop(*page);
  retired_.clear();
}

/// The tensor's storage is the parameter's page from now on, in place of the one that was; that one
/// has the page `former`, if any.
void Engine::Impl::take_storage(Parameter& parameter, const at::Tensor& tensor,
                                pager::Page* former) {
  retire_former(tensor.storage());
  pager::Page& page = *parameter.storage->page();
  auto was = parameter.storage->lock();
  const auto old = storages_.find(parameter.storage->key());
  torch::StorageTable::instance().erase(old->first);
  runtime_->pager().set_binding(page, nullptr);  // an eviction must not meet it half undone
  parameter.storage->detach();
  retired_.push_back(std::move(old->second));
  storages_.erase(old);
  parameter.storage = &make_storage(tensor.storage(), page);
  if (former == nullptr) return;
  if (was == nullptr) {
    runtime_->pager().drop(*former);
  } else {
    make_storage(c10::Storage(std::move(was)), *former).set_former();
  }
}

/// Gradients and state lie in the order of the storage: another one is for before there are any.
void Engine::Impl::follow_layout(Parameter& parameter, const at::Tensor& tensor) const {
  if (tensor.strides() == c10::IntArrayRef(parameter.strides)) return;
  PAGODA_REQUIRE(!stepped_ && !parameter.given,
                 "parameter '{}' was given another memory layout after the first step "
                 "(to(memory_format=…), .data = p.data.t()): do that before attach(), or "
                 "release() the model and attach() it again",
                 parameter.name);
  parameter.strides = tensor.strides().vec();
}

/// Whether a parameter has the page of this storage, which may have died: it was given another one
/// and no operator has met it since.
bool Engine::Impl::is_parameters(const torch::PageStorage& storage) const {
  return std::any_of(parameters_.begin(), parameters_.end(),
                     [&](const Parameter& one) { return one.storage == &storage; });
}

/// Forgets storages that have died; the pager has been told by them.
void Engine::Impl::sweep() {
  // Now and then: their weak references keep torch from using an address again before that.
  if (++births_since_sweep_ < storages_.size()) return;
  births_since_sweep_ = 0;
  std::vector<const c10::StorageImpl*> gone;
  for (const auto& [key, storage] : storages_) {
    if (storage->gone() && !is_parameters(*storage)) gone.push_back(key);
  }
  if (gone.empty()) return;
  runtime_->pager().drop_dead_pages();  // before the bindings go
  for (const c10::StorageImpl* key : gone) {
    torch::StorageTable::instance().erase(key);
    storages_.erase(key);
  }
}

/// The parameter's tensor, where it lives and a pass may give it a gradient.
std::optional<at::Tensor> Engine::Impl::reachable(const Parameter& parameter) {
  auto alive = parameter.tensor.lock();
  if (alive == nullptr || (parameter.frozen && !alive->requires_grad())) return std::nullopt;
  return at::Tensor(std::move(alive));
}

/// storage_exchanged() for a call that can say so: values that may not be written now are dropped,
/// and the next call goes on with those of before.
void Engine::Impl::take_new_values(std::size_t index, const at::Tensor& tensor) {
  try {
    storage_exchanged(index);
  } catch (const engine::RefusedInWindow& refused) {
    exchange(parameters_[index], tensor, false);
    throw UserError(fmt::format(
        "{}. What the parameter was given (.data =, set_) is dropped: it keeps its previous values",
        refused.what()));
  }
}

/// The parameter has its hooks, its page and its layout, or gets them back.
void Engine::Impl::check_parameter(std::size_t index, const at::Tensor& tensor) {
  Parameter& parameter = parameters_[index];
  // torch has one slot for a hook that sees accumulated gradients: one that the user has set after
  // attach() took ours away, and is called before it from now on. Gradients that came meanwhile are
  // in p.grad, and step() takes them from there.
  if (torch::hook_of(tensor) != parameter.hook) set_hook(index, tensor);
  torch::keep_gradient_hook(tensor);
  const c10::Storage& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  if (storage.unsafeGetStorageImpl() != parameter.storage->key()) {
    take_new_values(index, tensor);  // no operator has used it since, or it was refused there
  }
  follow_layout(parameter, tensor);
  PAGODA_REQUIRE(!parameter.storage->replaced(),
                 "the memory of parameter '{}' was exchanged under it (share_memory_(), or an "
                 "extension): share a copy of the model, or release() it first",
                 parameter.name);
}

StepReport Engine::Impl::step(bool joining) {
  const Calling calling(*this, joining ? "join()" : "step()");
  runtime_->check();
  drop_retired();
  end_last_pass();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (const auto tensor = reachable(parameters_[i])) check_parameter(i, *tensor);
  }
  take_set_gradients();
  push_late();
  if (!joining) {
    const std::lock_guard lock(gradient_mutex_);
    look_for_thawed();
  }
  if (const auto stream = consumer()) runtime_->pager().note_user(*stream);
  const auto bumped = [this](pager::Page& page) { bump(page); };
  engine::StepResult result;
  if (joining) {
    runtime_->join(bumped);
  } else {
    result = runtime_->step(bumped);
  }
  backwards_ = 0;
  stepped_ = true;
  for (Parameter& parameter : parameters_) parameter.given = false;
  forget_thawed();
  return {result.step, result.skipped, result.norm.value_or(-1), result.loss_scale};
}

void Engine::Impl::bump(pager::Page& page) {
  const auto found = of_page_.find(&page);
  if (found == of_page_.end()) return;
  for (const std::size_t index : found->second) {
    if (auto alive = parameters_[index].tensor.lock()) {
      torch::bump_version(at::Tensor(std::move(alive)));
    }
  }
}

std::shared_ptr<void> Engine::Impl::pin(const at::Tensor& tensor, bool write) {
  torch::PageStorage* storage = find(tensor);
  if (storage == nullptr || storage->former()) {  // one that no operator has used yet
    const auto same = [&](const Parameter& one) { return one.key == tensor.unsafeGetTensorImpl(); };
    const auto found = std::find_if(parameters_.begin(), parameters_.end(), same);
    if (found != parameters_.end()) {
      storage_exchanged(static_cast<std::size_t>(found - parameters_.begin()));
      storage = find(tensor);
    }
  }
  PAGODA_REQUIRE(storage != nullptr, "the tensor is not a parameter of this engine");
  pager::Page* page = storage->page();
  auto hold = std::make_unique<pager::Hold>(
      runtime_->pager().hold(*page, consumer().get(), write, runtime_->raw_writes(*page)));
  return {hold.release(), [here = io::OwnerProcess()](pager::Hold* last) {
            if (here.here()) delete last;  // a fork's locks are as they were
          }};
}

}  // namespace pagoda
