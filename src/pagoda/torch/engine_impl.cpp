// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/engine_impl.h"

#include <algorithm>
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
#include "pagoda/engine/backend.h"
#include "pagoda/torch/cuda_library.h"
#include "pagoda/torch/cuda_memory.h"
#include "pagoda/torch/element_type.h"
#include "pagoda/torch/gradient_hook.h"
#include "pagoda/torch/storage_table.h"

namespace pagoda {
namespace {

kernels::Dtype dtype_of(const at::Tensor& tensor, const std::string& name) {
  if (const auto known = torch::element_type(tensor)) return *known;
  throw UserError(fmt::format("parameter '{}' is {}: fp32, bf16 and fp16 can be trained", name,
                              c10::toString(tensor.scalar_type())));
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
  torch::observer::install();
}

Engine::Impl::~Impl() {
  activation_pool_.reset();
  for (Parameter& parameter : parameters_) {
    torch::ParameterTable::instance().erase(parameter.key);
    if (auto alive = parameter.tensor.lock()) {
      torch::remove_gradient_hook(at::Tensor(std::move(alive)));
    }
  }
  if (std::uncaught_exceptions() > 0 && !runtime_->failed() && runtime_->ranks() > 1) {
    // The other ranks shall not wait for one that is on its way out.
    runtime_->fail(std::make_exception_ptr(
        EngineError(fmt::format("rank {} ended with an exception", runtime_->rank()))));
  }
  for (auto& [key, storage] : storages_) torch::StorageTable::instance().erase(storage->key());
  torch::observer::remove();
  for (auto& [key, storage] : storages_) {
    // The page of a storage that has died may be gone.
    if (storage->alive() && storage->page() != nullptr) storage->page()->binding = nullptr;
  }
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

ThreadPool& Engine::Impl::activation_pool() {
  if (activation_pool_ == nullptr)
    activation_pool_ = std::make_unique<ThreadPool>(1, "activations");
  return *activation_pool_;
}

std::string Engine::Impl::touch_failed(std::exception_ptr error) noexcept {
  try {
    std::rethrow_exception(error);
  } catch (const pager::NotHeld& mistake) {  // of the operator's caller, who may go on
    return mistake.what();
  } catch (...) {
    runtime_->fail(std::current_exception());
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
  const auto found = storages_.find(tensor.storage().unsafeGetStorageImpl());
  return found == storages_.end() ? nullptr : found->second.get();
}

/// The same sizes over a storage on the engine's device.
void Engine::Impl::point_at(at::Tensor& tensor, const c10::Storage& storage) const {
  at::Tensor there = at::empty({0}, tensor.options().device(device()));
  there.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  there.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                     tensor.storage_offset());
  tensor.set_data(there);
}

torch::PageStorage& Engine::Impl::adopt(const at::Tensor& tensor, const std::string& name) {
  sweep();
  if (torch::PageStorage* known = find(tensor)) return *known;
  // A view of a storage that has moved to the engine's device already follows it there.
  const auto moved = moved_.find(tensor.storage().unsafeGetStorageImpl());
  if (moved != moved_.end()) {
    if (auto there = moved->second.to.lock(); there != nullptr && !moved->second.from.expired()) {
      const at::DisableRecordFunctionGuard unseen;
      at::Tensor here = tensor;
      point_at(here, c10::Storage(std::move(there)));
      return *find(here);
    }
    moved_.erase(moved);
  }
  PAGODA_REQUIRE(
      torch::StorageTable::instance().find(tensor.storage().unsafeGetStorageImpl()) == nullptr,
      "parameter '{}' belongs to another engine: release it there first", name);
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
    } catch (const EngineError&) {  // a disk failed: later calls shall say so too
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
    point_at(here, storage);
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
  if (find(tensor) != nullptr) return;
  pager::Page& page = *parameter.storage->page();
  const at::DisableRecordFunctionGuard unseen;
  PAGODA_REQUIRE(
      of_page_[&page].size() == 1 && tensor.storage().nbytes() == page.bytes() &&
          static_cast<Bytes>(tensor.element_size()) == page.element_size &&
          tensor.storage_offset() == 0 && tensor.device() == device(),
      "parameter '{}' was given a storage of another size, type or device after attach(): "
      "release() the model first",
      parameter.name);
  log::info("torch", "a parameter's storage was exchanged", {{"parameter", parameter.name}});
  if (const auto stream = consumer()) stream->synchronize();
  runtime_->pager().overwrite(page, static_cast<const std::byte*>(tensor.storage().data()));
  auto storage = std::make_unique<torch::PageStorage>(tensor.storage(), runtime_->pager(), *this);
  storage->watch(page);
  const c10::StorageImpl* old = parameter.storage->key();
  torch::StorageTable::instance().erase(old);
  parameter.storage->let_go();
  runtime_->pager().set_binding(page, storage.get());
  parameter.storage = storage.get();
  storages_.erase(old);
  torch::StorageTable::instance().insert(storage->key(), *storage);
  storages_[storage->key()] = std::move(storage);
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
  runtime_->pager().bury_dead();  // before the bindings go
  for (const c10::StorageImpl* key : gone) {
    torch::StorageTable::instance().erase(key);
    storages_.erase(key);
  }
}

void Engine::Impl::check_trainable(const at::Tensor& tensor, const std::string& name) const {
  PAGODA_REQUIRE(!tensor.is_sparse() && tensor.layout() == at::kStrided,
                 "parameter '{}' is sparse: only dense ones can be paged", name);
  PAGODA_REQUIRE(!tensor.is_complex(), "parameter '{}' is complex: train its real view instead",
                 name);
  const bool plain =
      tensor.has_storage() && !tensor.key_set().has_any(c10::DispatchKeySet(
                                  {c10::DispatchKey::Python, c10::DispatchKey::FuncTorchBatched,
                                   c10::DispatchKey::FuncTorchGradWrapper}));
  PAGODA_REQUIRE(plain, "parameter '{}' is a tensor subclass, of which the bytes are not known",
                 name);
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
                                                      std::size_t in_page) const {
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

void Engine::Impl::attach(const std::vector<NamedTensor>& model,
                          std::vector<ParameterGroup> groups) {
  runtime_->check();
  PAGODA_REQUIRE(parameters_.empty(), "a model is attached already: release() it first");
  PAGODA_REQUIRE(!groups.empty(), "there is no optimizer");
  const bool one_for_all = groups.size() == 1 && groups[0].parameters.empty();
  std::unordered_map<const c10::TensorImpl*, std::uint32_t> group_of;
  for (std::uint32_t g = 0; g < groups.size(); ++g) {
    for (const at::Tensor& tensor : groups[g].parameters) {
      PAGODA_REQUIRE(group_of.emplace(tensor.unsafeGetTensorImpl(), g).second,
                     "a parameter is in two groups, of which {} is the second", g);
    }
  }
  std::vector<pager::Page*> pages;
  std::vector<engine::TrainedSpec> specs;
  std::unordered_map<const pager::Page*, std::size_t> spec_of;
  std::vector<Parameter> parameters;
  std::vector<std::pair<at::Tensor, std::size_t>> trained;  // tensor, spec
  std::unordered_map<const c10::TensorImpl*, bool> seen;    // tied parameters come once
  for (const auto& [name, tensor] : model) {
    if (!seen.emplace(tensor.unsafeGetTensorImpl(), true).second) continue;
    const auto index = static_cast<std::uint32_t>(seen.size() - 1);
    check_trainable(tensor, name);
    torch::PageStorage& storage = adopt_of(model, name, tensor);
    pager::Page& page = *storage.page();
    page.name = name;
    if (std::find(pages.begin(), pages.end(), &page) == pages.end()) pages.push_back(&page);
    const auto group = group_of.find(tensor.unsafeGetTensorImpl());
    if (!tensor.requires_grad() || (!one_for_all && group == group_of.end())) continue;
    const auto [spec, fresh] = spec_of.emplace(&page, specs.size());
    if (fresh) specs.push_back({&page, dtype_of(tensor, name), {}, {}});
    engine::TrainedSpec& target = specs[spec->second];
    PAGODA_REQUIRE(target.dtype == dtype_of(tensor, name),
                   "parameters of different types share the storage of '{}'", name);
    for (const optim::Segment& segment : segments_of(tensor, target.parameters.size())) {
      target.segments.push_back(segment);
    }
    target.parameters.push_back({index, one_for_all ? 0 : group->second, 0, false, false});
    Parameter parameter{c10::weak_intrusive_ptr<c10::TensorImpl>(tensor.getIntrusivePtr()),
                        name,
                        &storage,
                        nullptr,
                        target.parameters.size() - 1,
                        nullptr,
                        0,
                        0};
    trained.emplace_back(tensor, spec->second);
    parameters.push_back(std::move(parameter));
  }
  parameters_ = std::move(parameters);  // nothing of a model that was refused before stays
  try {
    for (engine::TrainedSpec& spec : specs) {
      std::sort(spec.segments.begin(), spec.segments.end(),
                [](const auto& a, const auto& b) { return a.range.begin < b.range.begin; });
      for (std::size_t i = 1; i < spec.segments.size(); ++i) {
        PAGODA_REQUIRE_GE(spec.segments[i].range.begin, spec.segments[i - 1].range.end,
                          "two parameters share elements of the storage of '{}': tie them by using "
                          "one parameter twice",
                          spec.page->name);
      }
    }
    std::vector<Optimizer> rules;
    for (const ParameterGroup& group : groups) rules.push_back(group.optimizer);
    std::vector<const pager::Page*> page_of_spec;
    for (const auto& spec : specs) page_of_spec.push_back(spec.page);
    runtime_->attach(pages, std::move(specs), std::move(rules));
    for (std::size_t i = 0; i < parameters_.size(); ++i) {
      Parameter& parameter = parameters_[i];
      parameter.page = runtime_->trained(*parameter.storage->page());
      of_page_[parameter.storage->page()].push_back(i);
      parameter.attached =
          std::make_unique<torch::AttachedParameter>(torch::AttachedParameter{this, i});
      parameter.key = trained[i].first.unsafeGetTensorImpl();
      torch::ParameterTable::instance().insert(parameter.key, *parameter.attached);
      parameter.hook = torch::set_gradient_hook(
          trained[i].first, [this, i](const at::Tensor& tensor) { gradient_ready(i, tensor); });
    }
  } catch (...) {
    for (const Parameter& parameter : parameters_) {
      if (parameter.key == nullptr) continue;
      torch::ParameterTable::instance().erase(parameter.key);
      if (auto alive = parameter.tensor.lock()) {
        torch::remove_gradient_hook(at::Tensor(std::move(alive)));
      }
    }
    parameters_.clear();
    of_page_.clear();
    throw;
  }
}

void Engine::Impl::check_hooks() {
  for (const Parameter& parameter : parameters_) {
    const auto alive = parameter.tensor.lock();
    if (alive == nullptr) continue;
    PAGODA_REQUIRE(
        torch::hook_of(at::Tensor(alive)) == parameter.hook,
        "the gradient hook of '{}' was replaced after attach(): its gradient is lost; set "
        "hooks of your own before attach(), which keeps them",
        parameter.name);
    PAGODA_REQUIRE(alive->unsafe_storage().unsafeGetStorageImpl() == parameter.storage->key(),
                   "the storage of '{}' was exchanged after attach() (.data =, set_, to()): write "
                   "into the parameter with copy_() instead, or release() the model before",
                   parameter.name);
  }
}

StepReport Engine::Impl::step(bool joining) {
  runtime_->check();
  {
    const std::lock_guard lock(gradient_mutex_);
    plain_passes_.clear();  // of passes that failed: their end was never told
  }
  end_of_backward();
  check_hooks();
  backwards_ = 0;
  const auto bumped = [this](pager::Page& page) { bump(page); };
  engine::StepResult result;
  if (joining) {
    runtime_->join(bumped);
  } else {
    result = runtime_->step(bumped);
  }
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

std::shared_ptr<void> Engine::Impl::pin(const at::Tensor& tensor) {
  torch::PageStorage* storage = find(tensor);
  PAGODA_REQUIRE(storage != nullptr, "the tensor is no parameter of this engine");
  pager::Page* page = storage->page();
  runtime_->pager().hold(*page, consumer().get());
  return {nullptr, [this, page](void*) { runtime_->pager().release_hold(*page); }};
}

void Engine::Impl::release(const std::vector<at::Tensor>& model) {
  runtime_->finish();
  for (const at::Tensor& tensor : model) {
    torch::PageStorage* storage = find(tensor);
    if (storage == nullptr) continue;
    torch::ParameterTable::instance().erase(tensor.unsafeGetTensorImpl());
    torch::remove_gradient_hook(tensor);
    pager::Page& page = *storage->page();
    at::Tensor plain = at::empty({static_cast<std::int64_t>(page.elements)},
                                 tensor.options().requires_grad(false));
    {
      const auto pinned = pin(tensor);
      const at::DisableRecordFunctionGuard unseen;
      const at::Tensor all =
          at::from_blob(tensor.storage().mutable_data(), {static_cast<std::int64_t>(page.elements)},
                        plain.options());
      plain.copy_(all);
      if (const auto stream = consumer()) stream->synchronize();
    }
    torch::StorageTable::instance().erase(storage->key());
    runtime_->pager().set_binding(page, nullptr);
    c10::DataPtr data =
        plain.storage().unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr(nullptr, plain.device()));
    storage->give_back(std::move(data));
  }
  runtime_->detach();
  for (const at::Tensor& tensor : model) {
    torch::PageStorage* storage = find(tensor);
    if (storage == nullptr) continue;
    runtime_->pager().drop(*storage->page());
    storages_.erase(storage->key());
  }
  parameters_.clear();
  of_page_.clear();
}

}  // namespace pagoda
