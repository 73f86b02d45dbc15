// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/passes.h"

#include <algorithm>
#include <exception>
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

namespace pagoda::torch {
namespace {

/// Autograd runs as many passes inside each other on one thread, and further ones on others.
constexpr std::size_t kDeepest = ::torch::autograd::MAX_DEPTH;

/// torch.utils.checkpoint's reentrant kind, and what has been copied from it: their backward runs
/// one pass, so what that has accumulated does not have to wait for the end of the function.
constexpr std::string_view kOnePass = "CheckpointFunctionBackward";

}  // namespace

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

/// A node that a thread evaluates.
class Passes::Evaluation final : public at::ObserverContext {
 public:
  bool uses(const pager::Page& page) const {
    return function != 0 && (pages == nullptr || std::binary_search(pages->begin(), pages->end(),
                                                                    &page, std::less<>()));
  }

  int pass = kNoPass;
  const Node* node = nullptr;
  bool deep = false;                                    // passes inside it run on another thread
  bool ran_pass = false;                                // one inside it
  bool function = false;                                // it is a custom one
  bool one_pass = false;                                // …that runs no more than one inside it
  std::string name;                                     // of the function
  std::shared_ptr<const CustomFunctions::Pages> pages;  // of its forward; null: any
};

thread_local std::vector<Passes::Evaluation*> Passes::evaluations;

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

Passes& Passes::instance() {
  static auto* const kept = new Passes;  // autograd's threads may outlive static objects
  return *kept;
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

void Passes::add_function(Pass& pass, const Node& node, Kind kind, bool distrusted,
                          const Lock& /*lock*/) {
  std::shared_ptr<const CustomFunctions::Pages> pages;
  if (kind == Kind::Python) {
    if (!distrusted) {
      pages = CustomFunctions::instance().used_by(
          {node.thread_id(), static_cast<std::int64_t>(node.sequence_nr())});
    }
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

/// Knows the pass that this thread runs from now on, if it did not.
void Passes::begin(int number) {
  std::unordered_set<std::string> distrusted;
  {
    const Lock lock(mutex_);
    if (number == kNoPass || passes_.contains(number)) return;
    distrusted = distrusted_;
  }
  const auto& nodes = *::torch::autograd::get_current_graph_task_nodes_in_graph();
  std::unordered_set<const Node*> suspects;
  for (const Node* node : nodes) {  // without the lock, for Python's is taken
    if (!distrusted.empty() && distrusted.contains(node->name())) suspects.insert(node);
  }
  // Without the lock, which its end takes. If another thread sees the pass, too, one end does.
  ::torch::autograd::Engine::get_default_engine().queue_callback(
      [ending = std::make_shared<Ending>(number)] {
        ending->over = true;
        instance().pass_ends(ending->pass);
      });
  auto pass = std::make_unique<Pass>();
  const auto* needed = ::torch::autograd::get_current_graph_task_exec_info();
  const Lock lock(mutex_);
  if (passes_.contains(number)) return;
  const auto around = std::find_if(evaluations.rbegin(), evaluations.rend(),
                                   [&](const Evaluation* one) { return one->pass != number; });
  if (around != evaluations.rend()) {
    pass->around = (*around)->pass;
    for (Evaluation* evaluation : evaluations) evaluation->ran_pass = true;
  } else if (!deep_.empty()) {
    pass->around = deep_.back();
  }
  const auto add = [&](const Node& node) {
    const Kind kind = kind_of(node, lock);
    if (kind == Kind::Plain) return;
    if (needed != nullptr && !needed->empty()) {  // torch.autograd.grad(), backward(inputs=…)
      const auto found = needed->find(const_cast<Node*>(&node));
      if (found == needed->end() || !found->second.needed_) return;
    }
    if (kind == Kind::Accumulation) {
      pass->accumulations.insert(&node);
    } else {
      add_function(*pass, node, kind, suspects.contains(&node), lock);
    }
  };
  for (const Node* node : nodes) add(*node);
  // The root is not among them; it is what is evaluated first.
  if (const auto root = ::torch::autograd::get_current_node()) add(*root);
  passes_[number] = std::move(pass);
}

std::unique_ptr<at::ObserverContext> Passes::node_begins(std::string_view name) {
  auto evaluation = std::make_unique<Evaluation>();
  evaluation->pass = current_pass();
  if (evaluation->pass == kNoPass) return nullptr;
  // Most nodes are of the pass that this thread evaluated a node of before.
  thread_local int known = kNoPass;
  if (evaluation->pass != known) begin(evaluation->pass);
  known = evaluation->pass;
  const auto node = ::torch::autograd::get_current_node();
  evaluation->node = node.get();
  const Lock lock(mutex_);
  const auto pass = passes_.find(evaluation->pass);
  if (pass == passes_.end()) return nullptr;
  if (const auto function = pass->second->functions.find(node.get());
      function != pass->second->functions.end()) {
    evaluation->function = true;
    evaluation->pages = function->second;
    evaluation->name = name;
    evaluation->one_pass = name == kOnePass && !distrusted_.contains(evaluation->name);
  }
  evaluations.push_back(evaluation.get());
  evaluation->deep = evaluations.size() >= kDeepest;
  if (evaluation->deep) deep_.push_back(evaluation->pass);
  return evaluation;
}

void Passes::node_ends(at::ObserverContext& context) noexcept {
  const auto& ended = static_cast<const Evaluation&>(context);
  std::erase(evaluations, &ended);
  std::vector<std::shared_ptr<PassListener>> listeners;
  {
    const Lock lock(mutex_);
    if (ended.deep) deep_.erase(std::find(deep_.rbegin(), deep_.rend(), ended.pass).base() - 1);
    if (!ended.function) return;
    const auto found = passes_.find(ended.pass);
    if (found == passes_.end()) return;
    Pass& pass = *found->second;
    if (pass.functions.erase(ended.node) == 0) return;
    if (kind_of(*ended.node, lock) == Kind::Cpp) {
      cpp_runs_passes_[typeid(*ended.node)] |= ended.ran_pass;
    }
    if (ended.pages == nullptr) {
      --pass.users_of_any;
    } else {
      for (const pager::Page* page : *ended.pages) {
        if (--pass.users[page] == 0) pass.users.erase(page);
      }
    }
    for (auto one = found; one != passes_.end(); one = passes_.find(one->second->around)) {
      for (const auto& listener : one->second->listeners) {
        if (auto alive = listener.lock()) listeners.push_back(std::move(alive));
      }
    }
  }
  for (const auto& listener : listeners) listener->function_ended(ended.pages.get());
}

/// The pass is under way no more.
std::vector<std::weak_ptr<PassListener>> Passes::take_listeners(int pass) {
  const Lock lock(mutex_);
  const auto found = passes_.find(pass);
  if (found == passes_.end()) return {};
  std::vector<std::weak_ptr<PassListener>> listeners = std::move(found->second->listeners);
  passes_.erase(found);
  return listeners;
}

void Passes::pass_ends(int number) {
  std::exception_ptr error;
  for (const auto& listener : take_listeners(number)) {
    const auto alive = listener.lock();
    if (alive == nullptr) continue;
    try {
      alive->pass_ended(number);
    } catch (...) {
      if (error == nullptr) error = std::current_exception();
    }
  }
  if (error != nullptr) std::rethrow_exception(error);
}

void Passes::pass_fails(int number) noexcept {
  for (const auto& listener : take_listeners(number)) {
    if (const auto alive = listener.lock()) alive->pass_failed(number);
  }
}

int Passes::outermost(int pass, const Lock& /*lock*/) const {
  for (auto found = passes_.find(pass); found != passes_.end();
       found = passes_.find(found->second->around)) {
    pass = found->first;
  }
  return pass;
}

bool Passes::runs_beside(int other) const {
  const Lock lock(mutex_);
  return passes_.contains(other) && outermost(other, lock) != outermost(current_pass(), lock);
}

int Passes::listen(const std::weak_ptr<PassListener>& listener) {
  begin(current_pass());
  const Lock lock(mutex_);
  const int number = outermost(current_pass(), lock);
  const auto found = passes_.find(number);
  if (found == passes_.end()) return kNoPass;
  auto& listeners = found->second->listeners;
  const auto same = [&](const std::weak_ptr<PassListener>& other) {
    return !other.owner_before(listener) && !listener.owner_before(other);
  };
  if (std::none_of(listeners.begin(), listeners.end(), same)) listeners.push_back(listener);
  return number;
}

bool Passes::accumulated(const at::Tensor& parameter, const pager::Page& page) {
  const auto accumulation = ::torch::autograd::impl::try_get_grad_accumulator(parameter);
  begin(current_pass());
  const Lock lock(mutex_);
  if (const auto pass = passes_.find(current_pass()); pass != passes_.end()) {
    pass->second->accumulations.erase(accumulation.get());
  }
  return is_complete(accumulation.get(), page, lock);
}

bool Passes::is_complete(const at::Tensor& parameter, const pager::Page& page) const {
  const auto accumulation = ::torch::autograd::impl::try_get_grad_accumulator(parameter);
  const Lock lock(mutex_);
  return is_complete(accumulation.get(), page, lock);
}

bool Passes::is_complete(const Node* accumulation, const pager::Page& page,
                         const Lock& /*lock*/) const {
  std::ptrdiff_t users = 0;
  for (const auto& [number, pass] : passes_) {
    if (pass->accumulations.contains(accumulation)) return false;
    users += pass->users_of_any;
    if (const auto found = pass->users.find(&page); found != pass->users.end()) {
      users += found->second;
    }
  }
  // What runs here has accumulated what it will, if it runs one pass only.
  users -= std::count_if(evaluations.begin(), evaluations.end(),
                         [&](const Evaluation* one) { return one->one_pass && one->uses(page); });
  return users <= 0;
}

bool Passes::under_way(int pass) const {
  const Lock lock(mutex_);
  return passes_.contains(pass);
}

bool Passes::distrust_running_functions() {
  bool any = false;
  const Lock lock(mutex_);
  for (const Evaluation* evaluation : evaluations) {
    if (!evaluation->function || kind_of(*evaluation->node, lock) != Kind::Python) continue;
    distrusted_.insert(evaluation->name);
    any = true;
  }
  return any;
}

void Passes::before_fork() {
  mutex_.lock();
}

void Passes::after_fork(bool in_child) {
  if (in_child) {
    evaluations.clear();
    deep_.clear();
    for (auto& [number, pass] : passes_) pass.release();  // locks in it may be anybody's
    passes_.clear();
  }
  mutex_.unlock();
}

}  // namespace pagoda::torch
