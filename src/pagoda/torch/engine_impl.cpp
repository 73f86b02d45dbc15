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
  runtime_->end_waits();  // for a page, an update or another rank
  const std::vector<torch::PageStorage*> storages = storages_.all();
  for (torch::PageStorage* one : storages) {
    const auto alive = one->lock();  // the page of a storage that has died may be gone
    if (alive != nullptr && one->page() != nullptr) {
      make_lost(*one, torch::PageStorage::kLost);
    } else {
      torch::StorageTable::instance().erase(one->key());
    }
  }
  torch::TableUse::wait_for_all();
  torch::observer::remove();
  // Storages go on dying, where others than this thread have them.
  for (torch::PageStorage* one : storages) one->end();
  runtime_.reset();
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
  std::call_once(activations_made_, [this] {
    activation_pool_ = std::make_unique<ThreadPool>(1, "activations");
    activations_ = std::make_shared<torch::ActivationStore>(
        runtime_->tiers(), *activation_pool_, device(), [this] { return consumer(); });
  });
  return activations_;
}

std::string Engine::Impl::touch_failed(std::exception_ptr error) noexcept {
  std::string why = "the engine has failed";
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
    } catch (const std::exception& cause) {
      why = cause.what();
      runtime_->fail(std::current_exception());
    } catch (...) {
      runtime_->fail(std::current_exception());
    }
  }
  try {
    runtime_->check();
  } catch (const std::exception& cause) {  // the first error: with its page, path and errno
    return cause.what();
  }
  return why;  // of an engine that has ended meanwhile
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
  return storages_.find(tensor.storage().unsafeGetStorageImpl());
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
  return make_storage(here.storage(), page, false);
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
torch::PageStorage& Engine::Impl::make_storage(const c10::Storage& storage, pager::Page& page,
                                               bool former) {
  auto made = std::make_unique<torch::PageStorage>(storage, runtime_->pager(), *this, former);
  made->watch(page);
  runtime_->pager().set_binding(page, made.get());
  ++made_since_sweep_;
  return storages_.add(std::move(made));
}

/// Whether a parameter has the page of this storage, which may have died: it was given another one
/// and no operator has met it since.
bool Engine::Impl::is_parameters(const torch::PageStorage& storage) const {
  return std::any_of(parameters_.begin(), parameters_.end(),
                     [&](const Parameter& one) { return one.storage == &storage; });
}

/// Whether it is a parameter of the model that is in no group. Nobody follows its storages.
bool Engine::Impl::is_untrained(const at::Tensor& tensor) const {
  return std::any_of(untrained_.begin(), untrained_.end(), [&](const auto& one) {
    return one._unsafe_get_target() == tensor.unsafeGetTensorImpl();
  });
}

/// Forgets storages that have died; the pager has been told by them.
void Engine::Impl::sweep() {
  // Now and then: their weak references keep torch from using an address again before that.
  if (made_since_sweep_ < storages_.size()) return;
  made_since_sweep_ = 0;
  std::vector<const torch::PageStorage*> gone;
  const std::lock_guard no_exchange(exchange_mutex_);
  for (const torch::PageStorage* one : storages_.all()) {
    if (one->gone() && !is_parameters(*one)) gone.push_back(one);
  }
  if (gone.empty()) return;
  runtime_->pager().drop_dead_pages();  // before the bindings go
  for (const torch::PageStorage* one : gone) (void)storages_.take(one->key());
}

/// The parameter's tensor, where it lives and a pass may give it a gradient.
std::optional<at::Tensor> Engine::Impl::reachable(const Parameter& parameter) {
  auto alive = parameter.tensor.lock();
  if (alive == nullptr || (parameter.frozen && !alive->requires_grad())) return std::nullopt;
  return at::Tensor(std::move(alive));
}

StepReport Engine::Impl::step(bool joining) {
  const Calling calling(*this, joining ? "join()" : "step()");
  runtime_->check();
  drop_retired();
  drop_kept_memory();
  end_last_pass();
  check_parameters();
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
  torch::TableUse use;  // of what is found until it is held
  (void)use.enter();
  torch::PageStorage* storage = find(tensor);
  if (storage == nullptr || storage->former()) {  // one that no operator has used yet
    const auto* parameter = torch::ParameterTable::instance().find(tensor.unsafeGetTensorImpl());
    if (parameter != nullptr && parameter->client == this) {
      storage_exchanged(parameter->number);
      storage = find(tensor);
    }
  }
  if (storage == nullptr && is_untrained(tensor)) return nullptr;
  PAGODA_REQUIRE(storage != nullptr, "the tensor is not a parameter of this engine");
  pager::Page* page = storage->page();
  auto hold = std::make_unique<pager::Hold>(
      runtime_->pager().hold(*page, consumer().get(), write, runtime_->raw_writes(*page)));
  return {hold.release(), [here = io::OwnerProcess()](pager::Hold* last) {
            if (here.here()) delete last;  // a fork's locks are as they were
          }};
}

}  // namespace pagoda
