// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/engine_impl.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <unordered_set>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/base/out_of_memory.h"
#include "pagoda/engine/backend.h"
#include "pagoda/io/io_error.h"
#include "pagoda/torch/activation_store.h"
#include "pagoda/torch/cuda_library.h"
#include "pagoda/torch/cuda_memory.h"
#include "pagoda/torch/gradient_hook.h"
#include "pagoda/torch/list_operators.h"
#include "pagoda/torch/pageable.h"
#include "pagoda/torch/storage_table.h"
#include "pagoda/torch/value_lists.h"

namespace pagoda {
namespace {

/// Whether the tensor's bytes can be copied: those of meta, sparse and other tensors cannot.
bool has_plain_bytes(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_meta() && tensor.layout() == at::kStrided &&
         tensor.has_storage() && tensor.numel() > 0 && !tensor.is_quantized();
}

/// A buffer of the user's model, which ranks start with alike.
engine::BufferSpec buffer_spec(const std::string& name, const at::Tensor& tensor) {
  const auto bytes = static_cast<Bytes>(tensor.numel()) * tensor.element_size();
  const auto read = [tensor](std::span<std::byte> to) {
    const at::Tensor plain = tensor.detach().resolve_conj().resolve_neg().to(at::kCPU).contiguous();
    std::memcpy(to.data(), plain.const_data_ptr(), to.size());
  };
  const auto write = [tensor](std::span<const std::byte> from) {
    const at::Tensor plain = at::from_blob(const_cast<std::byte*>(from.data()), tensor.sizes(),
                                           at::TensorOptions().dtype(tensor.dtype()));
    tensor.detach().copy_(plain);
  };
  return {name, bytes, read, write};
}

}  // namespace

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
      return mistake.user_message();
    } catch (const OutOfMemory& memory) {
      return memory.user_message();
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
  const bool from_host = tensor.device().is_cpu();
  if (!from_host) consumer()->synchronize();
  const auto* data = static_cast<const std::byte*>(tensor.storage().data());
  pager::Page& page = [&]() -> pager::Page& {
    try {
      return runtime_->pager().adopt(
          std::move(known_as), bytes / size, size,
          engine::pager_placement(runtime_->config().parameters), data,
          from_host ? device::Direction::HostToHost : device::Direction::DeviceToHost);
    } catch (const io::IoError&) {  // it has other pages, too: later calls shall say so
      runtime_->fail(std::current_exception());
      throw;
    }
  }();
  at::Tensor here = tensor;
  if (tensor.device() != device()) {
    c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(nullptr, device()),
                         nullptr, false);
    moved_.insert_or_assign(
        tensor.storage().unsafeGetStorageImpl(),
        Moved{tensor.storage().getWeakStorageImpl(), storage.getWeakStorageImpl()});
    point_at(here, storage, device());
  }
  auto storage = std::make_unique<torch::PageStorage>(here.storage(), runtime_->pager(), *this);
  torch::PageStorage& out = *storage;
  out.watch(page);
  runtime_->pager().set_binding(page, &out);
  storages_[out.key()] = std::move(storage);
  torch::StorageTable::instance().insert(out.key(), out);
  return out;
}

/// The parameter's new storage becomes its page: same state, other bytes.
void Engine::Impl::storage_exchanged(std::size_t index) {
  Parameter& parameter = parameters_[index];
  auto alive = parameter.tensor.lock();
  if (alive == nullptr) return;
  const at::Tensor tensor(std::move(alive));
  if (const torch::PageStorage* known = find(tensor)) {
    PAGODA_REQUIRE(known == parameter.storage,
                   "parameter '{}' was given the storage of page '{}' (.data =, set_): give it a "
                   "copy of the values (p.data = q.data.clone())",
                   parameter.name, known->page()->name());
    return;
  }
  pager::Page& page = *parameter.storage->page();
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
  if (const auto stream = consumer()) stream->synchronize();
  runtime_->pager().overwrite(page, static_cast<const std::byte*>(tensor.storage().data()));
  take_storage(parameter, tensor);
}

/// The tensor's storage is the parameter's page from now on, in place of the one that was.
void Engine::Impl::take_storage(Parameter& parameter, const at::Tensor& tensor) {
  pager::Page& page = *parameter.storage->page();
  auto storage = std::make_unique<torch::PageStorage>(tensor.storage(), runtime_->pager(), *this);
  storage->watch(page);
  const c10::StorageImpl* old = parameter.storage->key();
  torch::StorageTable::instance().erase(old);
  parameter.storage->detach();
  runtime_->pager().set_binding(page, storage.get());
  parameter.storage = storage.get();
  storages_.erase(old);
  torch::StorageTable::instance().insert(storage->key(), *storage);
  storages_[storage->key()] = std::move(storage);
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

/// Forgets storages that have died; the pager has been told by them.
void Engine::Impl::sweep() {
  // Now and then: their weak references keep torch from using an address again before that.
  if (++births_since_sweep_ < storages_.size()) return;
  births_since_sweep_ = 0;
  std::vector<const c10::StorageImpl*> gone;
  for (const auto& [key, storage] : storages_) {
    if (storage->gone()) gone.push_back(key);
  }
  if (gone.empty()) return;
  runtime_->pager().drop_dead_pages();  // before the bindings go
  for (const c10::StorageImpl* key : gone) {
    torch::StorageTable::instance().erase(key);
    storages_.erase(key);
  }
}

void Engine::Impl::check_modules(const ::torch::nn::Module& model) {
  const auto check = [](const ::torch::nn::Module& module, const std::string& name) {
    const auto* embedding = module.as<::torch::nn::EmbeddingImpl>();
    const auto* bag = module.as<::torch::nn::EmbeddingBagImpl>();
    const bool sparse = (embedding != nullptr && embedding->options.sparse()) ||
                        (bag != nullptr && bag->options.sparse());
    if (!sparse) return;
    throw UserError(
        fmt::format("module '{}' gives sparse gradients: build it with sparse(false)", name));
  };
  check(model, model.name());
  for (const auto& item : model.named_modules("", /*include_self=*/false)) {
    check(*item.value(), item.key());
  }
}

/// The runs of consecutive elements that a parameter has in its storage, in their order.
std::vector<optim::Segment> Engine::Impl::segments_of(const at::Tensor& tensor,
                                                      std::size_t in_page) {
  std::vector<optim::Segment> out;
  if (tensor.numel() == 0) return out;
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;  // stride, size
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) > 1) dims.emplace_back(tensor.stride(i), tensor.size(i));
  }
  std::sort(dims.begin(), dims.end());
  std::uint64_t run = 1;
  std::size_t inner = 0;
  while (inner < dims.size() && static_cast<std::uint64_t>(dims[inner].first) == run) {
    run *= static_cast<std::uint64_t>(dims[inner++].second);
  }
  const std::uint64_t runs = static_cast<std::uint64_t>(tensor.numel()) / run;
  for (std::uint64_t number = 0; number < runs; ++number) {
    std::uint64_t rest = number;
    auto begin = static_cast<std::uint64_t>(tensor.storage_offset());
    for (std::size_t d = inner; d < dims.size(); ++d) {
      const auto size = static_cast<std::uint64_t>(dims[d].second);
      begin += rest % size * static_cast<std::uint64_t>(dims[d].first);
      rest /= size;
    }
    out.push_back({{begin, begin + run}, static_cast<std::uint32_t>(in_page), number * run});
  }
  return out;
}

/// Adopts a parameter of a model. Where a budget has no room for it, says what all that are left
/// would need: nobody shall find that out parameter by parameter.
torch::PageStorage& Engine::Impl::adopt_of(const std::vector<NamedTensor>& model,
                                           const std::string& name, const at::Tensor& tensor) {
  try {
    return adopt(tensor, name);
  } catch (const BudgetExceeded& full) {
    const bool on_nvme = full.budget() == runtime_->tiers().budget(pager::Tier::Nvme).name();
    std::unordered_set<const c10::StorageImpl*> seen;
    Bytes left = 0;
    for (const auto& [other, other_tensor] : model) {
      if (!other_tensor.has_storage() || find(other_tensor) != nullptr) continue;
      if (!seen.insert(other_tensor.storage().unsafeGetStorageImpl()).second) continue;
      const Bytes bytes = other_tensor.storage().nbytes();
      left += on_nvme ? pager::Tiers::nvme_bytes(bytes) : bytes;
    }
    throw UserError(fmt::format(
        "{} = {} has {} left, and the parameters from '{}' on need {}: raise {} to at least {}, "
        "and more for gradients and optimizer states that lie there",
        full.budget(), format_bytes(full.limit()), format_bytes(full.available()), name,
        format_bytes(left), full.budget(),
        format_bytes_up(full.limit() - full.available() + std::max(left, full.requested()))));
  }
}

void Engine::Impl::attach(const std::vector<NamedTensor>& model, std::vector<ParameterGroup> groups,
                          const std::vector<NamedTensor>& buffers) {
  const Calling calling(*this, "attach()");
  runtime_->check();
  PAGODA_REQUIRE(parameters_.empty(), "a model is attached already: release() it first");
  std::vector<at::Tensor> given;
  std::vector<Adopted> adopted;
  bool all_are_here = false;  // every rank is in attach(), and none has done it
  try {
    const auto described = [&] {
      all_are_here = true;
      engine::ModelSpec spec = describe(model, groups, given, adopted);
      for (const auto& [name, tensor] : buffers) {
        if (has_plain_bytes(tensor) && find(tensor) == nullptr) {
          spec.buffers.push_back(buffer_spec(name, tensor));
        }
      }
      return spec;
    };
    const std::vector<pager::Page*> changed =
        runtime_->attach(described, [&] { watch_parameters(given); });
    for (const auto& [name, tensor] : model) {
      const pager::Page* page = find(tensor)->page();
      if (std::find(changed.begin(), changed.end(), page) != changed.end()) {
        torch::bump_version(tensor);
      }
    }
  } catch (...) {
    forget_parameters();
    if (all_are_here && !runtime_->failed()) give_back(model, adopted);
    throw;
  }
}

/// The model as the runtime takes it: its parameters become pages. `given`: the tensors that
/// parameters_ is about.
engine::ModelSpec Engine::Impl::describe(const std::vector<NamedTensor>& model,
                                         const std::vector<ParameterGroup>& groups,
                                         std::vector<at::Tensor>& given,
                                         std::vector<Adopted>& adopted) {
  PAGODA_REQUIRE(!groups.empty(), "there is no optimizer");
  for (const ParameterGroup& group : groups) optim::require_valid(group.optimizer);
  torch::require_pageable(model, device());
  const bool one_for_all = groups.size() == 1 && groups[0].parameters.empty();
  std::unordered_map<const c10::TensorImpl*, std::uint32_t> group_of;
  for (std::uint32_t g = 0; g < groups.size(); ++g) {
    for (const at::Tensor& tensor : groups[g].parameters) {
      PAGODA_REQUIRE(group_of.emplace(tensor.unsafeGetTensorImpl(), g).second,
                     "a parameter is in two groups, of which {} is the second", g);
    }
  }
  const auto trains = [&](const at::Tensor& tensor) {
    return tensor.requires_grad() &&
           (one_for_all || group_of.contains(tensor.unsafeGetTensorImpl()));
  };
  for (const auto& [name, tensor] : model) {  // before the first of them becomes a page
    require_ours_or_nobodys(tensor, name);
    if (trains(tensor)) torch::require_trainable(tensor, name);
  }
  std::vector<pager::Page*> pages;
  std::vector<Given> all;
  std::unordered_map<const c10::TensorImpl*, bool> seen;  // tied parameters come once
  for (const auto& [name, tensor] : model) {
    if (!seen.emplace(tensor.unsafeGetTensorImpl(), true).second) continue;
    const auto index = static_cast<std::uint32_t>(seen.size() - 1);
    const c10::Storage was = tensor.storage();
    const std::size_t born = births_;
    torch::PageStorage& storage = adopt_of(model, name, tensor);
    if (births_ != born) adopted.push_back({&storage, was.device(), was.getWeakStorageImpl()});
    pager::Page& page = *storage.page();
    runtime_->pager().rename(page, name);
    if (std::find(pages.begin(), pages.end(), &page) == pages.end()) pages.push_back(&page);
    const auto group = group_of.find(tensor.unsafeGetTensorImpl());
    if (!one_for_all && group == group_of.end()) continue;
    Given& one = all.emplace_back();
    one.tensor = tensor;
    one.name = name;
    one.index = index;
    one.group = one_for_all ? 0 : group->second;
    one.storage = &storage;
  }
  std::vector<engine::TrainedSpec> specs = specs_of(all, groups);
  std::vector<engine::FrozenSpec> frozen;
  for (const Given& one : all) {
    Parameter& parameter = parameters_.emplace_back(one.tensor);
    parameter.name = one.name;
    parameter.storage = one.storage;
    parameter.strides = one.tensor.strides().vec();
    parameter.in_page = one.in_page;
    given.push_back(one.tensor);
    if (!one.frozen()) continue;
    parameter.frozen = frozen.size();
    frozen_.push_back(parameters_.size() - 1);
    frozen.push_back({one.spec, static_cast<std::uint32_t>(one.in_page), one.name, one.obstacle});
  }
  std::vector<Optimizer> rules;
  for (const ParameterGroup& group : groups) rules.push_back(group.optimizer);
  return {std::move(pages), std::move(specs), std::move(rules), {}, std::move(frozen)};
}

void Engine::Impl::watch_parameters(const std::vector<at::Tensor>& given) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    // What cannot be trained has none of its own, whoever shares its page.
    if (!parameter.frozen || runtime_->can_be_trained(*parameter.frozen)) {
      parameter.page = runtime_->trained(*parameter.storage->page());
    }
    auto& sharing = of_page_[parameter.storage->page()];
    sharing.push_back(i);
    parameter.storage->set_parameters(sharing.size());
    parameter.attached =
        std::make_unique<torch::AttachedParameter>(torch::AttachedParameter{this, i});
    parameter.key = given[i].unsafeGetTensorImpl();
    torch::ParameterTable::instance().insert(parameter.key, *parameter.attached);
    set_hook(i, given[i]);
  }
}

void Engine::Impl::set_hook(std::size_t index, const at::Tensor& tensor) {
  parameters_[index].hook = torch::set_gradient_hook(
      tensor, {[this, index] { gradient_comes(index); },
               [this, index](const at::Tensor& with) { gradient_ready(index, with); }});
}

void Engine::Impl::forget_parameters() {
  for (const Parameter& parameter : parameters_) {
    if (parameter.key == nullptr) continue;
    torch::ParameterTable::instance().erase(parameter.key);
    if (auto alive = parameter.tensor.lock()) {
      torch::remove_gradient_hook(at::Tensor(std::move(alive)));
    }
  }
  parameters_.clear();
  stepped_ = false;
  frozen_.clear();
  of_page_.clear();
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
    take_storage(parameters_[index], tensor);
    throw UserError(fmt::format(
        "{}. What the parameter was given (.data =, set_) is dropped: it has the values of before",
        refused.user_message()));
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
  if (storage == nullptr) {  // it may have another storage, which no operator has used yet
    const auto same = [&](const Parameter& one) { return one.key == tensor.unsafeGetTensorImpl(); };
    const auto found = std::find_if(parameters_.begin(), parameters_.end(), same);
    if (found != parameters_.end()) {
      storage_exchanged(static_cast<std::size_t>(found - parameters_.begin()));
      storage = find(tensor);
    }
  }
  PAGODA_REQUIRE(storage != nullptr, "the tensor is no parameter of this engine");
  pager::Page* page = storage->page();
  return std::make_shared<pager::Hold>(
      runtime_->pager().hold(*page, consumer().get(), write, runtime_->raw_writes(*page)));
}

}  // namespace pagoda
