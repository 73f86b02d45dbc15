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
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "pagoda/torch/autograd_state.h"

namespace pagoda::torch {
namespace {

/// Where torch's thread-local state has the evaluation that a thread is in. Autograd takes that
/// state along to every thread that runs a pass; torch itself has no use for this kind.
constexpr c10::DebugInfoKind kEvaluationKind = c10::DebugInfoKind::INFERENCE_CONTEXT;

/// torch.utils.checkpoint's reentrant kind, and what has been copied from it: their backward runs
/// one pass, so what that has accumulated does not have to wait for the end of the function.
constexpr std::string_view kOnePass = "CheckpointFunctionBackward";

}  // namespace

/// What a thread is in that evaluates a node, or runs a pass inside that: immutable but for
/// `ran_pass`.
struct Passes::Evaluation final : c10::DebugInfoBase,
                                  std::enable_shared_from_this<Passes::Evaluation> {
  bool uses(const pager::Page& page) const {
    return node != nullptr && (pages == nullptr || std::binary_search(pages->begin(), pages->end(),
                                                                      &page, std::less<>()));
  }

  int pass = kNoPass;
  std::shared_ptr<Evaluation> around;  // in which the pass was begun
  // Of a custom function. Other nodes of a pass share one of these.
  const Node* node = nullptr;
  Kind kind = Kind::Plain;
  bool ran_pass = false;  // guarded by mutex_: inside it
  bool one_pass = false;  // it runs no more than one inside it
  std::string name;
  std::shared_ptr<const CustomFunctions::Pages> pages;  // of its forward; null: any
};

struct Passes::Pass {
  std::shared_ptr<Evaluation> around;  // in which it was begun: it is inside that pass
  /// What its plain nodes are evaluated in: an Evaluation on top of what autograd took along.
  std::shared_ptr<c10::ThreadLocalDebugInfo> inside;
  bool scaled = false;  // of an outermost one: see mark_scaled()
  /// Parameters whose gradient has not been accumulated in it yet.
  std::unordered_set<const Node*> accumulations;
  /// Custom functions that have not ended, with the pages of their forward; null: any page.
  std::unordered_map<const Node*, std::shared_ptr<const CustomFunctions::Pages>> functions;
  std::unordered_map<const pager::Page*, unsigned> users;  // of `functions`
  unsigned users_of_any = 0;
  std::vector<std::weak_ptr<PassListener>> listeners;
};

/// A custom function that a thread evaluates.
struct Passes::Running final : at::ObserverContext {
  explicit Running(std::shared_ptr<Evaluation> one)
      : evaluation(std::move(one)), inside(kEvaluationKind, evaluation) {}

  const std::shared_ptr<Evaluation> evaluation;
  const c10::DebugInfoGuard inside;
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

Passes& Passes::instance() {
  static auto* const kept = new Passes;  // autograd's threads may outlive static objects
  return *kept;
}

std::shared_ptr<Passes::Evaluation> Passes::current_evaluation() {
  auto* const found = dynamic_cast<Evaluation*>(c10::ThreadLocalDebugInfo::get(kEvaluationKind));
  return found != nullptr ? found->shared_from_this() : nullptr;
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
  pass->around = current_evaluation();
  while (pass->around != nullptr && pass->around->pass == number)
    pass->around = pass->around->around;
  for (Evaluation* one = pass->around.get(); one != nullptr; one = one->around.get()) {
    one->ran_pass = true;
  }
  const auto plain = std::make_shared<Evaluation>();
  plain->pass = number;
  plain->around = pass->around;
  {
    const c10::DebugInfoGuard inside(kEvaluationKind, plain);
    pass->inside = c10::ThreadLocalDebugInfo::current();
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
  const int number = current_pass();
  if (number == kNoPass) return nullptr;
  // Most nodes are of the pass that this thread evaluated a node of before.
  thread_local int known = kNoPass;
  if (number != known) begin(number);
  known = number;
  const auto node = ::torch::autograd::get_current_node();
  std::shared_ptr<Evaluation> evaluation;
  {
    const Lock lock(mutex_);
    const auto found = passes_.find(number);
    if (found == passes_.end()) return nullptr;
    const Pass& pass = *found->second;
    const auto function = pass.functions.find(node.get());
    if (function == pass.functions.end()) {
      // Autograd gives the thread its own state back when the evaluation is over.
      c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(pass.inside);
      return nullptr;
    }
    evaluation = std::make_shared<Evaluation>();
    evaluation->pass = number;
    evaluation->around = pass.around;
    evaluation->node = node.get();
    evaluation->kind = kind_of(*node, lock);
    evaluation->name = name;
    evaluation->one_pass = name == kOnePass && !distrusted_.contains(evaluation->name);
    evaluation->pages = function->second;
  }
  return std::make_unique<Running>(std::move(evaluation));
}

void Passes::node_ends(at::ObserverContext& context) noexcept {
  const Evaluation& ended = *static_cast<const Running&>(context).evaluation;
  std::vector<std::shared_ptr<PassListener>> listeners;
  {
    const Lock lock(mutex_);
    const auto found = passes_.find(ended.pass);
    if (found == passes_.end()) return;
    Pass& pass = *found->second;
    if (pass.functions.erase(ended.node) == 0) return;
    if (ended.kind == Kind::Cpp) {
      cpp_runs_passes_[typeid(*ended.node)] |= ended.ran_pass;
    }
    if (ended.pages == nullptr) {
      --pass.users_of_any;
    } else {
      for (const pager::Page* page : *ended.pages) {
        if (--pass.users[page] == 0) pass.users.erase(page);
      }
    }
    for (const Pass* one = &pass; one != nullptr; one = pass_around(*one, lock)) {
      for (const auto& listener : one->listeners) {
        if (auto alive = listener.lock()) listeners.push_back(std::move(alive));
      }
    }
  }
  for (const auto& listener : listeners) listener->function_ended(ended.pages.get());
}

/// The pass is under way no more.
std::vector<std::weak_ptr<PassListener>> Passes::take_listeners(int pass) {
  std::unique_ptr<Pass> over;  // goes after the lock, perhaps with what others keep in `inside`
  const Lock lock(mutex_);
  const auto found = passes_.find(pass);
  if (found == passes_.end()) return {};
  over = std::move(found->second);
  passes_.erase(found);
  return std::move(over->listeners);
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

const Passes::Pass* Passes::pass_around(const Pass& pass, const Lock& /*lock*/) const {
  if (pass.around == nullptr) return nullptr;
  const auto found = passes_.find(pass.around->pass);
  return found != passes_.end() ? found->second.get() : nullptr;
}

int Passes::outermost(int pass, const Lock& lock) const {
  const auto found = passes_.find(pass);
  if (found == passes_.end()) return pass;
  for (const Pass* one = found->second.get(); const Pass* around = pass_around(*one, lock);
       one = around) {
    pass = one->around->pass;
  }
  return pass;
}

bool Passes::runs_inside(int pass) {
  if (current_pass() == pass) return true;
  for (auto one = current_evaluation(); one != nullptr; one = one->around) {
    if (one->pass == pass) return true;
  }
  return false;
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
  for (auto one = current_evaluation(); one != nullptr; one = one->around) {
    if (!one->one_pass || !one->uses(page)) continue;
    const auto pass = passes_.find(one->pass);
    if (pass != passes_.end() && pass->second->functions.contains(one->node)) --users;
  }
  return users <= 0;
}

bool Passes::under_way(int pass) const {
  const Lock lock(mutex_);
  return passes_.contains(pass);
}

void Passes::mark_scaled() {
  begin(current_pass());
  const Lock lock(mutex_);
  const auto found = passes_.find(outermost(current_pass(), lock));
  if (found != passes_.end()) found->second->scaled = true;
}

bool Passes::is_scaled() const {
  const Lock lock(mutex_);
  const auto found = passes_.find(outermost(current_pass(), lock));
  return found != passes_.end() && found->second->scaled;
}

bool Passes::distrust_running_functions() {
  bool any = false;
  const Lock lock(mutex_);
  for (auto one = current_evaluation(); one != nullptr; one = one->around) {
    if (one->kind != Kind::Python) continue;
    distrusted_.insert(one->name);
    any = true;
  }
  return any;
}

void Passes::before_fork() {
  mutex_.lock();
}

void Passes::after_fork(bool in_child) {
  if (in_child) {
    for (auto& [number, pass] : passes_) pass.release();  // locks in it may be anybody's
    passes_.clear();
  }
  mutex_.unlock();
}

}  // namespace pagoda::torch
