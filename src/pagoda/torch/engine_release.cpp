// SPDX-License-Identifier: Apache-2.0
// Parameters become plain tensors again: release(), and close() with what was not released.
#include <algorithm>
#include <unordered_set>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/record_function.h>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/torch/engine_impl.h"
#include "pagoda/torch/gradient_hook.h"
#include "pagoda/torch/storage_table.h"
#include "pagoda/torch/table_use.h"

namespace pagoda {
namespace {

constexpr std::size_t kMostNames = 5;  // in a message

}  // namespace

/// What is attached is released as a whole, or training it would go on with a part.
void Engine::Impl::require_whole_model(const std::vector<at::Tensor>& model) const {
  std::unordered_set<const c10::TensorImpl*> given;
  bool any = false;
  for (const at::Tensor& tensor : model) {
    given.insert(tensor.unsafeGetTensorImpl());
    any = any || find(tensor) != nullptr;
  }
  for (const Parameter& parameter : parameters_) {  // also one that was given another storage
    const auto alive = parameter.tensor.lock();
    any = any || (alive != nullptr && given.contains(alive.get()));
  }
  PAGODA_REQUIRE(
      any,
      "no parameter of this model is a page of this engine: it was never attached or built by it, "
      "or has been released");
  for (const Parameter& parameter : parameters_) {
    const auto alive = parameter.tensor.lock();
    PAGODA_REQUIRE(alive == nullptr || given.contains(alive.get()),
                   "parameter '{}' is attached and not among those to be released: "
                   "release() the whole model",
                   parameter.name);
  }
}

/// A copy of the page, on the engine's device; from its home, which may be larger than the device
/// has room for, it is one on the host.
at::Tensor Engine::Impl::bytes_of(torch::PageStorage& storage) {
  pager::Page& page = *storage.page();
  const auto bytes = static_cast<std::int64_t>(page.bytes());
  const pager::PageSnapshot now = runtime_->pager().look(page);
  if (now.contents == pager::Contents::Clean && now.home_tier != pager::Tier::Device &&
      now.home_range.size() == page.elements) {
    const at::Tensor plain = at::empty({bytes}, at::TensorOptions().dtype(at::kByte));
    const pager::HomeReader reader = runtime_->pager().read(page);
    runtime_->tiers().read(reader.home(), 0,
                           {static_cast<std::byte*>(plain.mutable_data_ptr()), page.bytes()});
    return plain;
  }
  return copy_on_device(storage);
}

/// …in `memory`, where that is given.
at::Tensor Engine::Impl::copy_on_device(torch::PageStorage& storage, void* memory) {
  const at::DisableRecordFunctionGuard unseen;
  const auto bytes = static_cast<std::int64_t>(storage.page()->bytes());
  const auto options = at::TensorOptions(device()).dtype(at::kByte);
  const at::Tensor plain =
      memory == nullptr ? at::empty({bytes}, options) : at::from_blob(memory, {bytes}, options);
  // A pin, and no hold: operators of other threads wait for its room.
  const pager::Access access{storage.page(), false};
  const pager::Pin pin = runtime_->pager().touch({&access, 1}, 0, consumer().get());
  plain.copy_(at::from_blob(storage.key()->mutable_data(), {bytes}, plain.options()));
  if (const auto stream = consumer()) stream->synchronize();
  return plain;
}

Engine::Impl::PlainCopy Engine::Impl::copy_of(torch::PageStorage& storage) {
  if (void* const kept = storage.kept_memory()) {
    (void)copy_on_device(storage, kept);
    return {&storage, {}};
  }
  const at::Tensor plain = copy_on_device(storage);
  return {&storage, plain.storage().unsafeGetStorageImpl()->set_data_ptr(
                        c10::DataPtr(nullptr, plain.device()))};
}

/// Operators of other threads that have the page end first, and those that want it wait: they go on
/// with what `become` has made of its storage.
template <class Become>
void Engine::Impl::end_page(torch::PageStorage& storage, const Become& become) {
  pager::Pager& pager = runtime_->pager();
  const pager::Access access{storage.page(), true};
  pager.deny({&access, 1}, "this parameter's engine ends, or its model is being released");
  pager.set_binding(*storage.page(), nullptr);
  become();
  torch::StorageTable::instance().erase(storage.key());
  pager.allow({&access, 1});
}

/// Nobody has found the page, or runs on it, any more.
void Engine::Impl::wait_until_unused(const torch::PageStorage& storage) {
  torch::TableUse::wait_for_all();
  runtime_->pager().wait_until_unused(*storage.page());
}

/// The storage throws `why` from now on.
void Engine::Impl::make_lost(torch::PageStorage& storage, const char* why) {
  end_page(storage, [&] { storage.detach(why); });
}

void Engine::Impl::make_plain(PlainCopy& copy) {
  end_page(*copy.storage, [&] { copy.storage->give_back(std::move(copy.data)); });
  wait_until_unused(*copy.storage);
}

void Engine::Impl::release(const std::vector<at::Tensor>& model, const std::string& refusal) {
  torch::observer::require_no_operator("release()");
  require_no_call_around("release()");  // autograd runs over the hooks that go
  const Calling calling(*this, "release()");
  require_no_other_pass();
  const NoExchanges until_the_end(*this);
  drop_retired();
  std::vector<PlainCopy> copies;
  runtime_->release([&] {
    if (!refusal.empty()) throw UserError(refusal);
    require_whole_model(model);
    for (const at::Tensor& tensor : model) {
      torch::PageStorage* storage = find(tensor);
      const auto same = [&](const PlainCopy& copy) { return copy.storage == storage; };
      if (storage == nullptr || std::any_of(copies.begin(), copies.end(), same)) continue;
      copies.push_back(copy_of(*storage));
    }
  });
  // All ranks have their copies: from here on nothing is refused.
  (void)pass_events_->take_failure_of_all();
  forget_gradients();  // of a backward without its step: they go with the states
  for (const at::Tensor& tensor : model) {
    torch::ParameterTable::instance().erase(tensor.unsafeGetTensorImpl());
    if (find(tensor) != nullptr) torch::remove_gradient_hook(tensor);
  }
  torch::TableUse::wait_for_all();  // nobody exchanges a storage any more
  // Other ranks' threads may read this rank's shards until they have made their pages plain, too.
  runtime_->finish_together([&] {
    for (PlainCopy& copy : copies) make_plain(copy);
  });
  for (const PlainCopy& copy : copies) {
    runtime_->drop(*copy.storage->page());
    (void)storages_.take(copy.storage->key());
  }
  drop_exchanged();
  forget_parameters();
  backwards_ = 0;
}

/// Pages in place of which a parameter has got another storage, which it keeps.
void Engine::Impl::drop_exchanged() {
  runtime_->pager().drop_dead_pages();  // most of the storages that they had have died
  const bool sharded = runtime_->ranks() > 1 && runtime_->config().zero == 3;
  std::unordered_set<const torch::PageStorage*> ours;
  for (const Parameter& parameter : parameters_) ours.insert(parameter.storage);
  for (torch::PageStorage* storage : storages_.all()) {
    if (!ours.contains(storage)) continue;
    // The page of a storage that has died is gone, unless other ranks may have read it until now.
    const bool alive = storage->alive();
    if (alive) {
      make_lost(*storage,
                "this storage was a parameter's, which had another one when its model was released "
                "(.data =, set_): keep a copy (p.data.clone())");
      wait_until_unused(*storage);
    }
    const auto dropped = storages_.take(storage->key());
    if (alive || sharded) runtime_->drop(*dropped->page());
  }
}

/// After an attach() that failed: what it has made pages of are plain tensors again, where they
/// were. What there is no memory for stays a page, as after build().
void Engine::Impl::give_back(const std::vector<NamedTensor>& model,
                             const std::vector<Adopted>& adopted) {
  std::vector<pager::Page*> pages;
  runtime_->finish_together([&] {
    try {
      for (const Adopted& one : adopted) {
        pager::Page* const page = one.storage->page();
        const at::DisableRecordFunctionGuard unseen;
        const at::Tensor plain = bytes_of(*one.storage).to(one.device);
        if (one.device != device()) {  // the tensors were pointed at another storage
          auto was = one.was.lock();   // has its bytes if anybody has kept it
          const c10::Storage before = was != nullptr ? c10::Storage(was) : plain.storage();
          moved_.erase(before.unsafeGetStorageImpl());
          for (const auto& [name, tensor] : model) {
            if (find(tensor) != one.storage) continue;
            at::Tensor here = tensor;
            point_at(here, before, one.device);
          }
        }
        PlainCopy copy{one.storage, {}};
        if (one.device == device()) {
          copy.data = plain.storage().unsafeGetStorageImpl()->set_data_ptr(
              c10::DataPtr(nullptr, plain.device()));
        }
        make_plain(copy);
        (void)storages_.take(copy.storage->key());
        pages.push_back(page);
        if (runtime_->ranks() == 1) runtime_->drop(*std::exchange(pages.back(), nullptr));
      }
    } catch (const std::exception& error) {
      log::warn("torch", "attach() failed, and some parameters stay pages of the engine",
                {{"parameters", adopted.size() - pages.size()}, {"cause", error.what()}});
    }
  });
  for (pager::Page* page : pages) {
    if (page != nullptr) runtime_->drop(*page);
  }
}

/// Nobody has asked for the copies: they shall not take memory that other processes need.
void Engine::Impl::require_host_memory(Bytes bytes) const {
  if (runtime_->device().kind() == device::DeviceKind::Cuda) return;  // its allocator says so
  const Bytes free = runtime_->device().memory_info().free;
  const auto ranks = static_cast<Bytes>(runtime_->ranks());  // those of one host want it at once
  PAGODA_REQUIRE(bytes * ranks <= free - free / 10,
                 "a copy of them takes {}{}, and {} of host memory are free", format_bytes(bytes),
                 ranks == 1 ? "" : fmt::format(" on each of {} ranks", ranks), format_bytes(free));
}

std::string Engine::Impl::close(bool give_back) noexcept {
  // Whoever has the last reference to a storage may drop it meanwhile: then there is nothing to do.
  std::vector<std::pair<torch::PageStorage*, c10::intrusive_ptr<c10::StorageImpl>>> left;
  closing_.store(true);
  const NoExchanges until_the_end(*this);
  if (give_back) {
    for (torch::PageStorage* storage : storages_.all()) {
      auto alive = storage->lock();
      if (alive != nullptr && storage->page() != nullptr) {
        left.emplace_back(storage, std::move(alive));
      }
    }
  }
  if (left.empty()) return runtime_->close(), std::string();
  std::sort(left.begin(), left.end(),
            [](const auto& a, const auto& b) { return a.first->page()->id < b.first->page()->id; });
  Bytes bytes = 0;
  for (const auto& [storage, alive] : left) bytes += storage->page()->bytes();
  std::vector<PlainCopy> copies;
  const std::string why = runtime_->close([&] {
    drop_gradients();
    require_host_memory(bytes);
    for (const auto& [storage, alive] : left) copies.push_back(copy_of(*storage));
  });
  if (why.empty()) {
    forget_parameters();
    for (PlainCopy& copy : copies) {
      make_plain(copy);
      (void)storages_.take(copy.storage->key());
    }
    return {};
  }
  std::string names;
  for (std::size_t i = 0; i < std::min(left.size(), kMostNames); ++i) {
    names += fmt::format("{}'{}'", i == 0 ? "" : ", ", left[i].first->page()->name());
  }
  if (left.size() > kMostNames) names += fmt::format(" and {} others", left.size() - kMostNames);
  const char* advice =
      runtime_->failed()
          ? "The engine had failed, so their values are lost: load what was saved before, "
            "and train from there"
          : "Call engine.release(model) or engine.save_pretrained(directory) "
            "before the engine ends";
  return fmt::format(
      "the engine has ended with {} parameter{} that could not become plain tensors "
      "({}; {}): {}. {}",
      left.size(), left.size() == 1 ? "" : "s", names, format_bytes(bytes), why, advice);
}

}  // namespace pagoda
