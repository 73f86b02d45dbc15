// SPDX-License-Identifier: Apache-2.0
// A model comes to its engine: its parameters become pages, and what is trained of them is watched.
#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include <ATen/Functions.h>
#include <c10/core/ScalarType.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>

#include "pagoda/base/error.h"
#include "pagoda/torch/engine_impl.h"
#include "pagoda/torch/gradient_hook.h"
#include "pagoda/torch/pageable.h"
#include "pagoda/torch/storage_table.h"
#include "pagoda/torch/table_use.h"

namespace pagoda {
namespace {

/// Whether the tensor's bytes can be copied: those of meta, sparse and other tensors cannot.
bool has_plain_bytes(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_meta() && tensor.layout() == at::kStrided &&
         tensor.has_storage() && tensor.numel() > 0 && !tensor.is_quantized();
}

/// "float32 [4, 16]"
std::string type_and_shape(const at::Tensor& tensor) {
  return fmt::format("{} [{}]", c10::getDtypeNames(tensor.scalar_type()).first,
                     fmt::join(tensor.sizes(), ", "));
}

/// …and how it lies in its storage, where that does not follow from the shape. `owner`: the first
/// parameter of that storage, which has `elements`.
std::string form_of(const at::Tensor& tensor, const std::string& name, const std::string& owner,
                    std::uint64_t elements) {
  std::string out = type_and_shape(tensor);
  if (!tensor.is_contiguous()) {
    out += fmt::format(" with strides [{}]", fmt::join(tensor.strides(), ", "));
  }
  if (name != owner || static_cast<std::uint64_t>(tensor.numel()) != elements) {
    out += fmt::format(" at element {} of the {} in the storage of '{}'", tensor.storage_offset(),
                       elements, owner);
  }
  return out;
}

at::Tensor piece_on_host(std::span<const std::byte> bytes) {
  return at::from_blob(const_cast<std::byte*>(bytes.data()),
                       {static_cast<std::int64_t>(bytes.size())}, at::kByte);
}

/// Bytes of a contiguous tensor.
at::Tensor piece_of(const at::Tensor& tensor, Bytes offset, Bytes bytes) {
  return tensor.view({-1}).view(at::kByte).narrow(0, static_cast<std::int64_t>(offset),
                                                  static_cast<std::int64_t>(bytes));
}

/// A buffer of the user's model, which ranks start with alike.
engine::BufferSpec buffer_spec(const std::string& name, const at::Tensor& tensor) {
  const auto bytes = static_cast<Bytes>(tensor.numel()) * tensor.element_size();
  // Where its elements do not lie in their order, each piece costs a copy of all of them.
  const auto in_order = [tensor] {
    return tensor.detach().resolve_conj().resolve_neg().contiguous();
  };
  const auto read = [in_order](Bytes offset, std::span<std::byte> to) {
    piece_on_host(to).copy_(piece_of(in_order(), offset, to.size()));
  };
  const auto write = [tensor, in_order](Bytes offset, std::span<const std::byte> from) {
    const at::Tensor all = in_order();
    piece_of(all, offset, from.size()).copy_(piece_on_host(from));
    if (!all.is_alias_of(tensor)) tensor.detach().copy_(all);
  };
  return {name, bytes, read, write, type_and_shape(tensor)};
}

}  // namespace

void Engine::Impl::check_modules(const ::torch::nn::Module& model) {
  const auto check = [](const ::torch::nn::Module& module, const std::string& name) {
    const auto* embedding = module.as<::torch::nn::EmbeddingImpl>();
    const auto* bag = module.as<::torch::nn::EmbeddingBagImpl>();
    const bool sparse = (embedding != nullptr && embedding->options.sparse()) ||
                        (bag != nullptr && bag->options.sparse());
    if (!sparse) return;
    throw UserError(fmt::format(
        "module '{}' has sparse gradients, which are not supported: build it with sparse(false)",
        name));
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
        "and more for gradients and optimizer states placed there",
        full.budget(), format_bytes(full.limit()), format_bytes(full.available()), name,
        format_bytes(left), full.budget(),
        format_bytes_up(full.limit() - full.available() + std::max(left, full.requested()))));
  }
}

void Engine::Impl::attach(const std::vector<NamedTensor>& model, std::vector<ParameterGroup> groups,
                          const std::vector<NamedTensor>& buffers,
                          const std::function<void()>& begin) {
  const Calling calling(*this, "attach()");
  runtime_->check();
  PAGODA_REQUIRE(parameters_.empty(), "a model is attached already: release() it first");
  std::vector<at::Tensor> given;
  std::vector<Adopted> adopted;
  bool all_are_here = false;  // every rank is in attach(), and none has done it
  try {
    const auto described = [&] {
      all_are_here = true;
      if (begin) begin();
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
                     "a parameter of group {} is also in another group, or twice in this one", g);
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
  std::vector<engine::TensorSpec> tensors;
  std::unordered_map<const pager::Page*, std::string> owners;
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
    const auto [owner, first] = owners.emplace(&page, name);
    if (first) pages.push_back(&page);
    tensors.push_back({name, form_of(tensor, name, owner->second, page.elements)});
    const auto group = group_of.find(tensor.unsafeGetTensorImpl());
    if (!one_for_all && group == group_of.end()) {
      untrained_.emplace_back(tensor.getIntrusivePtr());
      continue;
    }
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
    parameter.dtype = one.tensor.scalar_type();
    parameter.in_page = one.in_page;
    given.push_back(one.tensor);
    if (!one.frozen()) continue;
    parameter.frozen = frozen.size();
    frozen_.push_back(parameters_.size() - 1);
    frozen.push_back({one.spec, static_cast<std::uint32_t>(one.in_page), one.name, one.obstacle});
  }
  std::vector<Optimizer> rules;
  for (const ParameterGroup& group : groups) rules.push_back(group.optimizer);
  return {std::move(pages),  std::move(specs),  std::move(rules), {},
          std::move(frozen), std::move(tensors)};
}

void Engine::Impl::watch_parameters(const std::vector<at::Tensor>& given) {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    // What cannot be trained has none of its own, whoever shares its page.
    if (!parameter.frozen || runtime_->can_be_trained(*parameter.frozen)) {
      parameter.page = runtime_->trained(*parameter.storage->page());
    }
    of_page_[parameter.storage->page()].push_back(i);
    parameter.storage->add_parameter(given[i]);
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
  torch::TableUse::wait_for_all();
  for (const Parameter& parameter : parameters_) {
    if (!parameter.shut) continue;
    torch::PageStorage::open_plain(*parameter.shut.unsafeGetStorageImpl());
  }
  parameters_.clear();
  untrained_.clear();
  stepped_ = false;
  frozen_.clear();
  of_page_.clear();
}

}  // namespace pagoda
