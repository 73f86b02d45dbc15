// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/engine.h"

#include <exception>
#include <utility>

#include <torch/nn/module.h>

#include "pagoda/base/error.h"
#include "pagoda/torch/activation_store.h"
#include "pagoda/torch/birth_scope.h"
#include "pagoda/torch/build_surroundings.h"
#include "pagoda/torch/engine_impl.h"
#include "pagoda/torch/large_blocks.h"

namespace pagoda {

Engine::Engine(const Config& config, std::shared_ptr<comm::World> world)
    : impl_(std::make_unique<Impl>(config, std::move(world))) {}

Engine::~Engine() {
  // A fork has neither the threads to wait for nor the right to the parent's swap.
  if (!impl_->runtime().here()) (void)impl_.release();
}

Engine::Impl& Engine::impl() const {
  impl_->runtime().require_here();
  return *impl_;
}

std::string Engine::close(bool give_back) noexcept {
  return impl_->runtime().here() ? impl_->close(give_back) : std::string();
}

void Engine::stop_calls() noexcept {
  impl_->stop_calls();
}

std::string Engine::call_under_way() {
  return impl().call_under_way();
}

bool Engine::runs_pass() {
  return impl().runs_plain_pass();
}

bool Engine::attached() {
  return impl().runtime().attached();
}

bool Engine::is_in_call(bool of_this_thread) {
  return impl().is_in_call(of_this_thread);
}

void Engine::require_no_call_around(const char* call) {
  impl().require_no_call_around(call);
}

struct Engine::Building::Scope {
  explicit Scope(Impl& impl)
      : birth([&impl](const at::Tensor& tensor) { impl.adopt(tensor, {}); }) {}

  const torch::BuildSurroundings surroundings;
  torch::BirthScope birth;
};

Engine::Building::Building(Engine& engine) : scope_(std::make_unique<Scope>(engine.impl())) {}

Engine::Building::~Building() = default;

void Engine::Building::finish() {
  scope_->birth.check();
}

void Engine::adopt(const at::Tensor& parameter, const std::string& name) {
  impl().runtime().check();
  impl().adopt(parameter, name);
}

void Engine::attach(::torch::nn::Module& model, std::vector<ParameterGroup> groups) {
  std::vector<NamedTensor> parameters;
  for (const auto& item : model.named_parameters()) parameters.emplace_back(item.pair());
  std::vector<NamedTensor> buffers;
  for (const auto& item : model.named_buffers()) buffers.emplace_back(item.pair());
  impl().attach(parameters, std::move(groups), buffers, [&] { Impl::check_modules(model); });
}

void Engine::attach(::torch::nn::Module& model, const Optimizer& optimizer) {
  attach(model, std::vector<ParameterGroup>{{{}, optimizer}});
}

void Engine::attach(const std::vector<NamedTensor>& parameters, std::vector<ParameterGroup> groups,
                    const std::vector<NamedTensor>& buffers, const std::function<void()>& begin) {
  impl().attach(parameters, std::move(groups), buffers, begin);
}

void Engine::backward(const at::Tensor& loss, std::optional<bool> last, bool retain_graph) {
  impl().backward(loss, last, retain_graph);
}

StepReport Engine::step() {
  return impl().step(false);
}

void Engine::join() {
  impl().step(true);
}

void Engine::finish() {
  impl().runtime().finish();
}

void Engine::barrier() {
  impl().barrier();
}

void Engine::begin_call(const std::string& label, const std::string& name,
                        const std::string& argument) {
  impl().begin_call(label, name, argument);
}

void Engine::end_call(const std::string& error) {
  impl().end_call(error);
}

void Engine::begin_work(const std::string& label) {
  impl().begin_work(label);
}

void Engine::end_work() {
  impl().end_work();
}

std::size_t Engine::open_calls() {
  return impl().open_calls();
}

void Engine::fail(const std::string& why) {
  if (!impl_->runtime().here()) return;  // a fork that fails is not the rank
  impl_->runtime().fail(std::make_exception_ptr(EngineError(why)), log::Level::Debug);
}

double Engine::waited_for_ranks() const noexcept {
  return impl_->runtime().here() ? static_cast<double>(impl_->runtime().waited_for_ranks()) / 1e9
                                 : 0;
}

void Engine::set_lr(double lr) {
  PAGODA_REQUIRE(!impl().runtime().groups().empty(), "no model is attached: call attach() first");
  for (std::size_t group = 0; group < impl().runtime().groups().size(); ++group) set_lr(group, lr);
}

void Engine::set_lr(std::size_t group, double lr) {
  impl().runtime().set_learning_rate(group, lr);
}

void Engine::require_changeable(const std::string& what) {
  impl().runtime().require_changeable(what);
}

void Engine::set_optimizer(std::size_t group, const Optimizer& optimizer) {
  impl().runtime().set_optimizer(group, optimizer);
}

void Engine::set_clip(double clip) {
  impl().runtime().set_clip(clip);
}

double Engine::loss_scale() const {
  return impl().runtime().loss_scale();
}

at::Tensor Engine::grad(const at::Tensor& parameter) {
  return impl().grad(parameter);
}

double Engine::grad_norm() {
  return impl().grad_norm();
}

bool Engine::has_gradients() {
  return impl().has_gradients();
}

void Engine::set_loss_is_scaled(bool scaled) {
  impl().set_loss_is_scaled(scaled);
}

void Engine::zero_grad() {
  impl().zero_grad();
}

std::shared_ptr<void> Engine::pin(const at::Tensor& parameter, bool write) {
  return impl().pin(parameter, write);
}

void Engine::check_pinned_writes() {
  if (!impl_->runtime().here()) return;  // what a fork writes, nobody sees
  impl_->runtime().check_raw_writes();
}

std::shared_ptr<torch::ActivationStore> Engine::activations() {
  return impl().activations();
}

void Engine::release(::torch::nn::Module& model) {
  impl().release(model.parameters(), {});
}

void Engine::release(const std::vector<at::Tensor>& parameters, const std::string& refusal) {
  impl().release(parameters, refusal);
}

engine::Stats Engine::stats() const {
  engine::Stats out = impl().runtime().stats();
  out.unbudgeted.free_blocks = torch::LargeBlocks::kept();
  return out;
}

int Engine::rank() const {
  return impl_->runtime().rank();
}

int Engine::world_size() const {
  return impl_->runtime().ranks();
}

c10::Device Engine::device() const {
  return impl_->device();
}

const Config& Engine::config() const {
  return impl_->runtime().config();
}

}  // namespace pagoda
