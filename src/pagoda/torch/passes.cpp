// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/passes.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <string_view>
#include <typeinfo>
#include <utility>

#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "pagoda/torch/autograd_state.h"
#include "pagoda/torch/storage_table.h"

namespace pagoda::torch {

struct Passes::Pass {
  int around = kNoPass;  // the pass that this one is inside
  /// Parameters whose gradient has not been accumulated in it yet.
  std::unordered_set<const Node*> accumulations;
  /// Custom functions that have not ended, with the pages of their forward; null: any page.
  std::unordered_map<const Node*, std::shared_ptr<const CustomFunctions::Pages>> functions;
  std::unordered_map<const pager::Page*, unsigned> users;  // of `functions`
  unsigned users_of_any = 0;
  std::vector<std::weak_ptr<PassListener>> listeners;
};

/// A custom function's backward, on the thread that runs it.
struct Passes::Running final : at::ObserverContext {
  int pass = kNoPass;
  const Node* node = nullptr;
  std::uint64_t number = 0;
  bool ran_pass = false;  // one inside it
  std::shared_ptr<const CustomFunctions::Pages> pages;

  bool uses(const pager::Page& page) const {
    return pages == nullptr ||
           std::binary_search(pages->begin(), pages->end(), &page, std::less<>());
  }
};

/// In the callback that autograd queues for the end of a pass. Where the pass fails it is dropped
/// without having been called.
struct Passes::Ending {
  explicit Ending(int number) : pass(number) {}
  Ending(const Ending&) = delete;
  Ending& operator=(const Ending&) = delete;
  ~Ending() {
    if (!over) instance().pass_fails(pass);
  }

  const int pass;
  bool over = false;  // on the thread that ends the pass, which drops it
};

namespace {

/// The last pass that this thread has seen a node of, if it has no custom functions.
thread_local int plain_pass = kNoPass;

}  // namespace

/// The custom functions whose backward runs on this thread, one inside the other.
struct Passes::Callbacks {
  static thread_local std::vector<Running*> running;

  static std::unique_ptr<at::ObserverContext> begins(const at::RecordFunction& /*node*/) {
    if (current_pass() == plain_pass || StorageTable::instance().empty()) return nullptr;
    return instance().node_begins();
  }
  static void ends(const at::RecordFunction& /*node*/, at::ObserverContext* context) {
    if (context == nullptr) return;
    auto& ended = static_cast<Running&>(*context);
    std::erase(running, &ended);
    instance().node_ends(ended);
  }
};

thread_local std::vector<Passes::Running*> Passes::Callbacks::running;

Passes& Passes::instance() {
  static auto* const kept = new Passes;  // autograd's threads may outlive static objects
  return *kept;
}

void Passes::install() {
  const Lock lock(mutex_);
  if (installed_++ > 0) return;
  handle_ = at::addGlobalCallback(at::RecordFunctionCallback(&Callbacks::begins, &Callbacks::ends)
                                      .scopes({at::RecordScope::BACKWARD_FUNCTION}));
}

void Passes::remove() {
  const Lock lock(mutex_);
  if (--installed_ > 0) return;
  at::removeCallback(std::exchange(handle_, at::INVALID_CALLBACK_HANDLE));
  passes_.clear();
}

std::uint64_t Passes::running_function() noexcept {
  return Callbacks::running.empty() ? 0 : Callbacks::running.back()->number;
}

Passes::Kind Passes::kind_of(const Node& node, const Lock& /*lock*/) {
  const std::type_info& type = typeid(node);
  const auto [known, fresh] = kinds_.try_emplace(type, Kind::Plain);
  if (!fresh) return known->second;
  // PyNode belongs to a library that a C++ program need not have; CppNode is a template.
  const std::string_view name = type.name();
  if (type == typeid(::torch::autograd::AccumulateGrad)) {
    known->second = Kind::Accumulation;
  } else if (name.find("PyNode") != std::string_view::npos) {
    known->second = Kind::Python;
  } else if (name.find("CppNode") != std::string_view::npos) {
    known->second = Kind::Cpp;
  }
  return known->second;
}

void Passes::add_function(Pass& pass, const Node& node, Kind kind, const Lock& /*lock*/) {
  std::shared_ptr<const CustomFunctions::Pages> pages;
  if (kind == Kind::Python) {
    pages = CustomFunctions::instance().used_by(
        {node.thread_id(), static_cast<std::int64_t>(node.sequence_nr())});
  } else if (const auto seen = cpp_runs_passes_.find(typeid(node));
             seen != cpp_runs_passes_.end() && !seen->second) {
    return;  // a function in C++ whose backward runs operators only
  }
  if (!pass.functions.try_emplace(&node, pages).second) return;
  if (pages == nullptr) {
    ++pass.users_of_any;
  } else {
    for (const pager::Page* page : *pages) ++pass.users[page];
  }
}

/// The pass that this thread runs; sees it for the first time perhaps.
Passes::Pass* Passes::find_or_begin(int number, const Lock& lock) {
  if (number == kNoPass) return nullptr;
  auto& slot = passes_[number];
  if (slot != nullptr) return slot.get();
  slot = std::make_unique<Pass>();
  Pass& pass = *slot;
  if (!Callbacks::running.empty()) {
    Running& around = *Callbacks::running.back();
    around.ran_pass = true;
    pass.around = around.pass;
  }
  const auto* wanted = ::torch::autograd::get_current_graph_task_exec_info();
  const auto add = [&](const Node& node) {
    const Kind kind = kind_of(node, lock);
    if (kind == Kind::Plain) return;
    if (wanted != nullptr && !wanted->empty()) {
      const auto found = wanted->find(const_cast<Node*>(&node));
      if (found == wanted->end() || !found->second.should_execute()) return;
    }
    if (kind == Kind::Accumulation) {
      pass.accumulations.insert(&node);
    } else {
      add_function(pass, node, kind, lock);
    }
  };
  for (const Node* node : *::torch::autograd::get_current_graph_task_nodes_in_graph()) add(*node);
  if (const auto root = ::torch::autograd::get_current_node()) add(*root);  // is not among them
  ::torch::autograd::Engine::get_default_engine().queue_callback(
      [ending = std::make_shared<Ending>(number)] {
        ending->over = true;
        instance().pass_ends(ending->pass);
      });
  return &pass;
}

std::unique_ptr<at::ObserverContext> Passes::node_begins() {
  static std::atomic<std::uint64_t> numbers{0};
  const int number = current_pass();
  const auto node = ::torch::autograd::get_current_node();
  const Lock lock(mutex_);
  const Pass* pass = find_or_begin(number, lock);
  if (pass == nullptr || node == nullptr) return nullptr;
  if (pass->functions.empty()) {
    plain_pass = number;
    return nullptr;
  }
  const auto function = pass->functions.find(node.get());
  if (function == pass->functions.end()) return nullptr;
  auto running = std::make_unique<Running>();
  running->pass = number;
  running->node = node.get();
  running->number = ++numbers;
  running->pages = function->second;
  Callbacks::running.push_back(running.get());
  return running;
}

void Passes::node_ends(const Running& running) noexcept {
  std::vector<std::shared_ptr<PassListener>> listeners;
  {
    const Lock lock(mutex_);
    const auto found = passes_.find(running.pass);
    if (found == passes_.end()) return;
    Pass& pass = *found->second;
    if (pass.functions.erase(running.node) == 0) return;
    if (kind_of(*running.node, lock) == Kind::Cpp) {
      cpp_runs_passes_[typeid(*running.node)] |= running.ran_pass;
    }
    if (running.pages == nullptr) {
      --pass.users_of_any;
    } else {
      for (const pager::Page* page : *running.pages) {
        if (--pass.users[page] == 0) pass.users.erase(page);
      }
    }
    listeners = listeners_around(running.pass, lock);
  }
  for (const auto& listener : listeners) listener->function_ended(running.pages.get());
}

/// Of the pass and of those that it is inside.
std::vector<std::shared_ptr<PassListener>> Passes::listeners_around(int pass,
                                                                    const Lock& /*lock*/) const {
  std::vector<std::shared_ptr<PassListener>> out;
  for (auto found = passes_.find(pass); found != passes_.end();
       found = passes_.find(found->second->around)) {
    for (const auto& listener : found->second->listeners) {
      if (auto alive = listener.lock()) out.push_back(std::move(alive));
    }
  }
  return out;
}

void Passes::pass_ends(int number) {
  std::vector<std::weak_ptr<PassListener>> listeners;
  {
    const Lock lock(mutex_);
    const auto found = passes_.find(number);
    if (found == passes_.end()) return;
    listeners = std::move(found->second->listeners);
    passes_.erase(found);
  }
  for (const auto& listener : listeners) {
    if (const auto alive = listener.lock()) alive->pass_ended();
  }
}

void Passes::pass_fails(int number) noexcept {
  std::vector<std::weak_ptr<PassListener>> listeners;
  {
    const Lock lock(mutex_);
    const auto found = passes_.find(number);
    if (found == passes_.end()) return;
    listeners = std::move(found->second->listeners);
    passes_.erase(found);
  }
  for (const auto& listener : listeners) {
    if (const auto alive = listener.lock()) alive->pass_failed();
  }
}

int Passes::listen(const std::weak_ptr<PassListener>& listener) {
  const Lock lock(mutex_);
  int number = current_pass();
  Pass* pass = find_or_begin(number, lock);
  if (pass == nullptr) return kNoPass;
  for (auto around = passes_.find(pass->around); around != passes_.end();
       around = passes_.find(pass->around)) {
    number = around->first;
    pass = around->second.get();
  }
  const auto same = [&](const std::weak_ptr<PassListener>& other) {
    return !other.owner_before(listener) && !listener.owner_before(other);
  };
  if (std::none_of(pass->listeners.begin(), pass->listeners.end(), same)) {
    pass->listeners.push_back(listener);
  }
  return number;
}

Outstanding Passes::accumulated(const at::Tensor& parameter, const pager::Page& page) {
  const auto accumulation = ::torch::autograd::impl::try_get_grad_accumulator(parameter);
  const Lock lock(mutex_);
  if (Pass* pass = find_or_begin(current_pass(), lock)) {
    pass->accumulations.erase(accumulation.get());
  }
  return outstanding(accumulation.get(), page, lock);
}

Outstanding Passes::outstanding(const at::Tensor& parameter, const pager::Page& page) const {
  const auto accumulation = ::torch::autograd::impl::try_get_grad_accumulator(parameter);
  const Lock lock(mutex_);
  return outstanding(accumulation.get(), page, lock);
}

Outstanding Passes::outstanding(const Node* accumulation, const pager::Page& page,
                                const Lock& /*lock*/) const {
  unsigned users = 0;
  for (const auto& [number, pass] : passes_) {
    if (pass->accumulations.contains(accumulation)) return Outstanding::More;
    users += pass->users_of_any;
    if (const auto found = pass->users.find(&page); found != pass->users.end()) {
      users += found->second;
    }
  }
  const auto here = static_cast<unsigned>(
      std::count_if(Callbacks::running.begin(), Callbacks::running.end(),
                    [&](const Running* function) { return function->uses(page); }));
  if (users == 0) return Outstanding::Nothing;
  return users > here ? Outstanding::More : Outstanding::RunningFunction;
}

}  // namespace pagoda::torch
