// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "pagoda/comm/solo_world.h"
#include "pagoda/comm/world.h"
#include "pagoda/engine/config.h"
#include "pagoda/engine/stats.h"
#include "pagoda/optim/optimizer.h"

namespace torch::nn {
class Module;
}

namespace pagoda::torch {
class ActivationStore;
}

namespace pagoda {

/// A tensor and what it is called in messages.
using NamedTensor = std::pair<std::string, at::Tensor>;

/// Parameters that are trained alike.
struct ParameterGroup {
  std::vector<at::Tensor> parameters;
  Optimizer optimizer;
};

/// What step() did.
struct StepReport {
  std::uint64_t step = 0;  ///< steps taken so far, skipped ones left out
  bool skipped = false;    ///< gradients were infinite: only the loss scale changed
  double norm = -1;        ///< of all gradients before clipping; negative where nothing needed it
  double loss_scale = 1;   ///< of the next step
};

/// Trains a model whose states may be larger than the device, the host, or both.
///
///   pagoda::Engine engine(config, pagoda::torch::world_from_env());
///   MyModel model = engine.build([&] { return MyModel(options); });
///   engine.attach(*model, pagoda::AdamW{.lr = 3e-4});
///   for (auto& batch : data) {
///     engine.backward(model->forward(batch));
///     engine.step();
///   }
///
/// One thread trains; autograd's threads may run operators at the same time. With several ranks,
/// attach(), step(), join(), zero_grad(), grad_norm(), grad(), barrier() and release() are
/// collectives: every rank calls them in the same order, and ranks that are in different calls get
/// an error that names both sides (docs/notes/communication.md). The destructor does not throw; it
/// serves other ranks until their engines end, too. Parameters that were not released throw on
/// access afterwards. After an error of the engine's every call throws it again. In a forked
/// process rank(), world_size(), device() and config() work, and all other calls throw.
class Engine {
 public:
  explicit Engine(const Config& config,
                  std::shared_ptr<comm::World> world = comm::make_solo_world());
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine();

  /// Its user is done with it. The other ranks, which stay as long as somebody may read their
  /// pages, do not wait for what still keeps it. `give_back`: parameters that are still pages
  /// become plain tensors, up to date, if they fit into memory; returns which do not and why, or
  /// nothing.
  std::string close(bool give_back = false) noexcept;

  /// Before a close() on another thread than the one that trains. From now on calls throw
  /// UserError, and so does a backward pass at its next gradient; who is in one may be waited for.
  void stop_calls() noexcept;
  /// The call that a thread is in now; what to say where its name is not known.
  std::string call_under_way();
  /// Whether a backward pass that is no call of the engine gives it gradients.
  bool runs_pass();
  /// Whether a model is attached.
  bool attached();
  /// Whether this thread is inside a call, or another one is; also one that begins and ends in
  /// calls of their own.
  bool is_in_call(bool of_this_thread);
  /// UserError on a thread that is inside a call of this engine, as a hook is.
  void require_no_call_around(const char* call);

  /// Runs `make`, whose parameters become pages as they are made.
  template <class Make>
  auto build(Make&& make) {
    Building building(*this);
    auto model = std::forward<Make>(make)();
    building.finish();
    return model;
  }
  /// Makes one tensor a page, before attach() or for good: what build() does with each parameter.
  void adopt(const at::Tensor& parameter, const std::string& name);

  /// Trains all parameters of `model`: those that require a gradient now, and the others, which are
  /// pages, too, from the step after they do. On several ranks they are thawed alike. Where they
  /// cannot be trained, step() throws UserError, and may be called again to go on without them.
  void attach(::torch::nn::Module& model, const Optimizer& optimizer);
  /// The same with groups; parameters in none of them are not trained.
  void attach(::torch::nn::Module& model, std::vector<ParameterGroup> groups);
  /// The same for a model that is no torch::nn::Module: all its parameters, with their names, and
  /// its buffers, which are no pages, but which ranks start with alike (Config::initial). `begin`
  /// is called first, when all ranks are in attach(): what it throws on one of them all throw.
  void attach(const std::vector<NamedTensor>& parameters, std::vector<ParameterGroup> groups,
              const std::vector<NamedTensor>& buffers = {},
              const std::function<void()>& begin = {});

  /// One micro-batch. `last`: no other comes before step(), so that updates may begin; by default
  /// the `accumulation`-th since the last step is. After it, until step(), what would change the
  /// step (another backward(), set_lr(), zero_grad()) and the use of parameters are errors where
  /// updates have begun, unless the steps before have shown that they are to be expected.
  void backward(const at::Tensor& loss, std::optional<bool> last = std::nullopt,
                bool retain_graph = false);
  /// At accumulation boundaries: fixes what the updates need and returns; they run while the next
  /// forward does. Micro-batches that are not complete make it wait for none: what came, counts.
  StepReport step();
  /// This rank has no more data: takes part in the others' steps until all have joined.
  void join();
  /// Returns when every update has been made.
  void finish();
  /// Returns when every rank has called it.
  void barrier();
  /// Around what all ranks do together under the name `label`: they are there when it begins. An
  /// `error` that this rank met in it is thrown on all the others when it ends; the engines live.
  /// It does not begin, and all throw UserError, where they have another `argument`, called `name`.
  void begin_call(const std::string& label, const std::string& name = {},
                  const std::string& argument = {});
  void end_call(const std::string& error = {});
  /// Around what this rank does by itself under the name `label`, while others may wait for it:
  /// they do not take it for idle.
  void begin_work(const std::string& label);
  void end_work();
  /// How many of these calls the thread is in.
  std::size_t open_calls();
  /// This rank cannot go on: the others get an error that says `why`, at once.
  void fail(const std::string& why);
  /// Seconds for which this rank has waited for others; 0: it does not. Any thread.
  double waited_for_ranks() const noexcept;

  void set_lr(double lr);
  void set_lr(std::size_t group, double lr);
  /// UserError where `what`, which changes the step to come, must wait for step().
  void require_changeable(const std::string& what);
  /// Other constants of the same rule.
  void set_optimizer(std::size_t group, const Optimizer& optimizer);
  /// Before attach(): what Config::clip says.
  void set_clip(double clip);
  double loss_scale() const;

  /// The gradient accumulated so far, as fp32 and as large as the parameter: on the host.
  /// Zeros where none has come; without the loss scale.
  at::Tensor grad(const at::Tensor& parameter);
  double grad_norm();
  void zero_grad();
  /// Whether a gradient has come on this rank since the last step.
  bool has_gradients();
  /// For frameworks that begin the backward pass themselves: while it is set, the losses of such
  /// passes have been multiplied by loss_scale(). Without it such a pass is an error where there is
  /// a loss scale.
  void set_loss_is_scaled(bool scaled);

  /// While the returned handle lives, the page is on the device and its pointer may be used; what a
  /// step() changes is there when it returns. On a GPU, writes by pointers need `write`. A
  /// parameter in no group that was given another storage is a plain tensor, which needs nothing:
  /// null.
  [[nodiscard]] std::shared_ptr<void> pin(const at::Tensor& parameter, bool write = false);
  /// A UserError if raw pointers have written under a pin where that is refused, which has undone
  /// it. step() says so, too.
  void check_pinned_writes();

  /// What autograd saves may be kept in the engine's tiers. There is one store; whoever holds what
  /// it saved keeps the engine alive.
  std::shared_ptr<torch::ActivationStore> activations();

  /// Parameters become plain tensors again, up to date. UserError if they do not fit into memory.
  void release(::torch::nn::Module& model);
  /// `refusal`: why this rank cannot, if it knows already; then all throw it.
  void release(const std::vector<at::Tensor>& parameters, const std::string& refusal = {});

  engine::Stats stats() const;
  int rank() const;
  int world_size() const;
  const Config& config() const;
  /// Where parameters are when they are in use.
  c10::Device device() const;

  class Impl;

 private:
  /// For every call but those that take no lock: throws in a forked process, where locks may be
  /// held by threads that are not there.
  Impl& impl() const;

  class Building {
   public:
    explicit Building(Engine& engine);
    ~Building();
    void finish();

   private:
    struct Scope;
    std::unique_ptr<Scope> scope_;
  };

  std::unique_ptr<Impl> impl_;
};

}  // namespace pagoda
