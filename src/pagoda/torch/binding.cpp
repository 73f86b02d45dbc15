// SPDX-License-Identifier: Apache-2.0
// The engine as Python sees it: classes under torch.classes.pagoda, without Python's ABI. The
// package in python/pagoda gives them their names and types. Part of the shared library only.
#include <algorithm>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/custom_class.h>

#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "pagoda/base/ranked_mutex.h"
#include "pagoda/engine/failure.h"
#include "pagoda/io/owner_process.h"
#include "pagoda/torch/bound_activations.h"
#include "pagoda/torch/bound_pin.h"
#include "pagoda/torch/build_surroundings.h"
#include "pagoda/torch/enders.h"
#include "pagoda/torch/engine.h"
#include "pagoda/torch/gloo_world.h"
#include "pagoda/torch/observer.h"
#include "pagoda/torch/optimizer_constants.h"
#include "pagoda/torch/page_storage.h"
#include "pagoda/torch/passes.h"
#include "pagoda/torch/python_errors.h"
#include "pagoda/torch/stats_counts.h"
#include "pagoda/torch/storage_table.h"
#include "pagoda/torch/table_use.h"

namespace pagoda::torch {
namespace {

/// Of the page that is at this address of a StorageImpl; nothing where there is none.
std::optional<std::string> page_at(std::int64_t storage) {
  const auto* key = reinterpret_cast<const c10::StorageImpl*>(storage);  // NOLINT
  TableUse use;
  use.enter();
  const PageStorage* found = StorageTable::instance().find(key);
  if (found == nullptr || found->page() == nullptr) return std::nullopt;
  return found->page()->name();
}

std::vector<std::string> config_keys() {
  std::vector<std::string> out;  // four texts for each key
  for (const ConfigKey& key : Config::keys()) {
    out.insert(out.end(), {key.name, key.type, key.initial, key.help});
  }
  return out;
}

/// For Python's atexit. A class, for its methods are called without Python's lock.
struct BoundInterpreter final : ::torch::CustomClassHolder {
  void ends() { Enders::instance().stop(); }
};

/// One thread trains, as pagoda::Engine says, and any thread may call: whoever does has a share in
/// the engine until his call returns. Python lets go of its lock meanwhile, so close() may wait for
/// calls of other threads, and for an engine to end; whoever else was the last to have it may not
/// (Enders).
class BoundEngine final : public ::torch::CustomClassHolder {
 public:
  using Group = c10::intrusive_ptr<::c10d::ProcessGroup>;

  BoundEngine(const std::string& config, const std::optional<Group>& group,
              const std::optional<Group>& gradients, bool from_env) {
    translating_errors([&] {
      auto* over = gradients.has_value() ? gradients->get() : nullptr;
      Config parsed;
      std::optional<UserError> mistake;
      try {
        parsed = Config::from_json(config);
      } catch (const UserError& error) {
        mistake = error;
      }
      GlooOptions options;
      options.joins_at_once = true;
      options.join_timeout = std::chrono::milliseconds(std::llround(parsed.join_timeout * 1000));
      auto world = group.has_value() ? world_from_group(**group, over, options)
                   : from_env        ? world_from_env(options)
                                     : comm::make_solo_world();
      if (mistake) {
        // The others shall not wait for this rank.
        world->give_up(engine::story_of(std::make_exception_ptr(*mistake), world->rank()));
        throw *mistake;
      }
      parsed.pin_advice =
          "pin it (with engine.pin(parameter):), or save the model with engine.save_pretrained()";
      engine_ = Enders::instance().share(std::make_unique<Engine>(parsed, std::move(world)));
    });
  }

  BoundEngine(const BoundEngine&) = delete;
  BoundEngine& operator=(const BoundEngine&) = delete;
  ~BoundEngine() override {
    if (owner_.here()) fail_unless_taken();
  }

  /// The package has it: from now on its end is that of the engine. Before, a Ctrl-C has cut its
  /// making short, and the other ranks hear of that instead.
  void taken() { taken_.store(true); }

  /// UserError where close() would wait for the call that it comes from.
  void require_may_close() {
    const std::shared_ptr<Engine> engine = open_or_closing();
    if (engine == nullptr) return;
    translating_errors([&] {
      observer::require_no_operator("close()");
      engine->require_no_call_around("close()");
    });
  }

  /// Ends the engine before it returns, unless a graph or a pin still needs its memory; the other
  /// ranks do not wait for those. Calls of other threads end first, a backward pass at its next
  /// gradient, with an error; one that takes longer than ranks wait for each other fails the
  /// engine. Returns what Engine::close() does.
  std::string close(bool give_back) {
    if (!owner_.here()) return {};  // a fork's locks are as they were
    require_may_close();
    const Enders::EndsHere here;
    std::shared_ptr<Engine> engine;
    {
      const std::lock_guard lock(mutex_);
      if (engine_ == nullptr) return {};  // closed, or another thread is at it
      closing_ = engine_;
      engine.swap(engine_);
    }
    fail_unless_taken();
    engine->stop_calls();
    const std::chrono::duration<double> patience(engine->config().timeout);
    if (!wait_for_others(*engine, patience)) {
      const std::string call = engine->call_under_way();
      engine->fail(
          fmt::format("close() was called while another thread was in {}, which did not end within "
                      "{} s",
                      call, patience.count()));
      if (!wait_for_others(*engine, kGrace)) {  // what it does is not the engine's: it may be stuck
        return fmt::format(
            "the engine has been closed, and another thread is still in {}: parameters that were "
            "not released are lost. Load what was saved before, and train from there",
            call);
      }
    }
    return engine->close(give_back);
  }

  void begin_build() {
    translating_errors([&] {
      (void)engine();
      owner_.require("an engine");
    });
    builds_.emplace_back(std::make_unique<BuildSurroundings>());
  }
  /// Also where a Ctrl-C came between the two, and nobody knows whether the other one has run.
  void end_build() {
    if (!builds_.empty()) builds_.pop_back();
  }

  void adopt(const at::Tensor& tensor, const std::string& name) {
    translating_errors([&] { engine()->adopt(tensor, name); });
  }

  /// `group_of`: of each parameter; negative: it is not trained. `refusal`: what is wrong with the
  /// arguments of this rank, if anything; all ranks throw it.
  void attach(const std::vector<std::string>& names, const std::vector<at::Tensor>& tensors,
              const std::vector<std::int64_t>& group_of, const std::vector<std::string>& kinds,
              const std::vector<Constants>& constants, const std::vector<std::string>& buffer_names,
              const std::vector<at::Tensor>& buffer_tensors, double clip, std::string refusal) {
    translating_errors([&] {
      PAGODA_CHECK(names.size() == tensors.size() && names.size() == group_of.size() &&
                   kinds.size() == constants.size() &&
                   buffer_names.size() == buffer_tensors.size());
      std::vector<ParameterGroup> groups(kinds.size());
      try {
        for (std::size_t g = 0; g < kinds.size(); ++g) {
          groups[g].optimizer = rule_of(kinds[g], constants[g]);
        }
      } catch (const UserError& mistake) {
        if (refusal.empty()) refusal = mistake.what();
      }
      std::vector<NamedTensor> parameters;
      for (std::size_t i = 0; i < names.size(); ++i) {
        parameters.emplace_back(names[i], tensors[i]);
        if (group_of[i] < 0) continue;
        groups.at(static_cast<std::size_t>(group_of[i])).parameters.push_back(tensors[i]);
      }
      std::vector<NamedTensor> buffers;
      for (std::size_t i = 0; i < buffer_names.size(); ++i) {
        buffers.emplace_back(buffer_names[i], buffer_tensors[i]);
      }
      const Use used = engine();
      used->attach(parameters, std::move(groups), buffers, [&] {
        if (!refusal.empty()) throw UserError(refusal);
        used->set_clip(clip);
      });
    });
  }

  bool attached() {
    return translating_errors([&] { return engine()->attached(); });
  }

  void release(const std::vector<at::Tensor>& parameters, const std::string& refusal) {
    translating_errors([&] { engine()->release(parameters, refusal); });
  }

  void backward(const at::Tensor& loss, std::optional<bool> last, bool retain_graph) {
    translating_errors([&] { engine()->backward(loss, last, retain_graph); });
  }

  std::tuple<std::int64_t, bool, double, double> step() {
    return translating_errors([&] {
      const StepReport report = engine()->step();
      return std::make_tuple(static_cast<std::int64_t>(report.step), report.skipped, report.norm,
                             report.loss_scale);
    });
  }

  void join() {
    translating_errors([&] { engine()->join(); });
  }
  void finish() {
    translating_errors([&] { engine()->finish(); });
  }
  void barrier() {
    translating_errors([&] { engine()->barrier(); });
  }
  void begin_call(const std::string& label, const std::string& name, const std::string& argument) {
    translating_errors([&] { engine()->begin_call(label, name, argument); });
  }
  void end_call(const std::string& error) {
    translating_errors([&] { engine()->end_call(error); });
  }
  void begin_work(const std::string& label) {
    translating_errors([&] { engine()->begin_work(label); });
  }
  void end_work() {
    translating_errors([&] { engine()->end_work(); });
  }
  std::int64_t open_calls() {
    return translating_errors([&] { return static_cast<std::int64_t>(engine()->open_calls()); });
  }
  /// From any thread. Also of an engine that has been closed: then there is nobody to tell.
  void fail(const std::string& why) {
    if (const auto engine = open_or_closing()) engine->fail(why);
  }
  /// From any thread.
  double waited_for_ranks() {
    const auto engine = open_or_closing();
    return engine != nullptr ? engine->waited_for_ranks() : 0;
  }
  void zero_grad() {
    translating_errors([&] { engine()->zero_grad(); });
  }
  bool has_gradients() {
    return translating_errors([&] { return engine()->has_gradients(); });
  }
  void set_loss_is_scaled(bool scaled) {
    translating_errors([&] { engine()->set_loss_is_scaled(scaled); });
  }
  void set_clip(double clip) {
    translating_errors([&] { engine()->set_clip(clip); });
  }
  void set_optimizer(std::int64_t group, const std::string& kind, const Constants& constants) {
    translating_errors([&] {
      engine()->set_optimizer(static_cast<std::size_t>(group), rule_of(kind, constants));
    });
  }
  void require_changeable(const std::string& what) {
    translating_errors([&] { engine()->require_changeable(what); });
  }
  double loss_scale() {
    return translating_errors([&] { return engine()->loss_scale(); });
  }
  at::Tensor grad(const at::Tensor& parameter) {
    return translating_errors([&] { return engine()->grad(parameter); });
  }
  double grad_norm() {
    return translating_errors([&] { return engine()->grad_norm(); });
  }

  c10::intrusive_ptr<BoundPin> pin(const std::vector<at::Tensor>& parameters, bool write) {
    return translating_errors([&] {
      const Use used = engine();
      auto out = c10::make_intrusive<BoundPin>();
      out->engine = used.share();
      for (const at::Tensor& parameter : parameters) {
        out->held.push_back(used->pin(parameter, write));
      }
      return out;
    });
  }

  c10::intrusive_ptr<BoundActivations> activations(const std::string& place,
                                                   const std::string& least,
                                                   const std::string& in_flight) {
    return translating_errors([&] {
      PAGODA_REQUIRE(place == "host" || place == "nvme",
                     "activations('{}') expects 'host' or 'nvme'", place);
      const Use used = engine();
      PAGODA_REQUIRE(place == "host" || !used->config().nvme.empty(),
                     "activations on nvme need directories: set nvme to at least one");
      const auto placement = place == "host" ? pager::Placement::Host : pager::Placement::Nvme;
      return c10::make_intrusive<BoundActivations>(
          used.share(),
          ActivationStore::Policy{placement, parse_bytes(least), parse_bytes(in_flight)});
    });
  }

  Counts stats() {
    return translating_errors([&] { return counts_of(engine()->stats()); });
  }
  std::string stats_table() {
    return translating_errors([&] { return engine()->stats().table(); });
  }
  std::string config() {
    return translating_errors([&] { return engine()->config().to_json(); });
  }
  std::string device() {
    return translating_errors([&] { return engine()->device().str(); });
  }
  std::int64_t rank() {
    return translating_errors([&] { return engine()->rank(); });
  }
  std::int64_t world_size() {
    return translating_errors([&] { return engine()->world_size(); });
  }

 private:
  static constexpr std::chrono::seconds kGrace{2};  // for a call to end once its engine has failed

  /// A call under way. It keeps the engine, and close() waits for it.
  class Use {
   public:
    explicit Use(BoundEngine& of) : of_(of) {
      if (!of_.owner_.here()) {  // a fork's locks are as they were, and it has this thread only
        engine_ = of_.engine_;
      } else {
        const std::lock_guard lock(of_.mutex_);
        engine_ = of_.engine_;
        if (engine_ == nullptr) engine_ = of_.closing_around_this_thread();
        if (engine_ != nullptr) of_.users_.push_back(std::this_thread::get_id());
      }
      PAGODA_REQUIRE(engine_ != nullptr, "the engine has been closed");
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    ~Use() {
      engine_.reset();  // first: who waits for this call is the last to have the engine
      if (!of_.owner_.here()) return;
      const std::lock_guard lock(of_.mutex_);
      of_.users_.erase(std::find(of_.users_.begin(), of_.users_.end(), std::this_thread::get_id()));
      of_.used_.notify_all();
    }

    Engine* operator->() const noexcept { return engine_.get(); }
    const std::shared_ptr<Engine>& share() const noexcept { return engine_; }

   private:
    BoundEngine& of_;
    std::shared_ptr<Engine> engine_;
  };

  Use engine() { return Use(*this); }

  /// The engine that is being closed, where close() waits for the call that this thread is in,
  /// which ends as ever. Holds mutex_.
  std::shared_ptr<Engine> closing_around_this_thread() const {
    auto engine = closing_.lock();
    return engine != nullptr && engine->is_in_call(true) ? engine : nullptr;
  }

  /// For calls of other threads to return, and backward passes that they run to end; whether they
  /// have, in this time.
  bool wait_for_others(Engine& engine, std::chrono::duration<double> limit) {
    constexpr std::chrono::milliseconds kLook{2};
    const auto until = std::chrono::steady_clock::now() +
                       std::chrono::duration_cast<std::chrono::nanoseconds>(limit);
    const auto me = std::this_thread::get_id();
    std::unique_lock lock(mutex_);
    const auto others = [&] {
      return std::any_of(users_.begin(), users_.end(), [&](const auto& one) { return one != me; });
    };
    for (;;) {
      if (!others()) {
        lock.unlock();
        const bool busy = engine.runs_pass() || engine.is_in_call(false);
        lock.lock();
        if (!busy && !others()) return true;
      }
      if (std::chrono::steady_clock::now() >= until) return false;
      used_.wait_for(lock, kLook);
    }
  }

  std::shared_ptr<Engine> open_or_closing() {
    if (!owner_.here()) return nullptr;
    const std::lock_guard lock(mutex_);
    return engine_ != nullptr ? engine_ : closing_.lock();
  }

  void fail_unless_taken() noexcept {
    const auto engine = open_or_closing();
    if (engine == nullptr || taken_.load() || engine->world_size() == 1) return;
    engine->fail("it was interrupted while its engine was made");
  }

  const io::OwnerProcess owner_;
  std::atomic<bool> taken_{false};
  RankedMutex<LockRank::BoundEngine> mutex_;
  Condition used_;
  std::vector<std::thread::id> users_;  // guarded by mutex_: who is in a call, once for each
  std::weak_ptr<Engine> closing_;       // guarded by mutex_: close() has been called
  std::shared_ptr<Engine> engine_;      // guarded by mutex_
  std::vector<std::unique_ptr<BuildSurroundings>> builds_;  // under way
};

}  // namespace
}  // namespace pagoda::torch

// Outside our namespaces: the macros say torch:: and mean the library.
TORCH_LIBRARY_FRAGMENT(pagoda, library) {
  using pagoda::torch::BoundActivations;
  using pagoda::torch::BoundEngine;
  using pagoda::torch::BoundInterpreter;
  using pagoda::torch::BoundPin;
  using pagoda::torch::BoundRegionPages;
  using pagoda::torch::BoundSaved;
  static_cast<void>(pagoda::log::level());  // a PAGODA_LOG that is not a level is told at once
  library.def("config_keys() -> str[]", pagoda::torch::config_keys);
  library.def("interrupt_joins() -> ()", [] { pagoda::torch::interrupt_joins(); });
  library.def("page_at(int storage) -> str?", pagoda::torch::page_at);
  library.def("mark_scaled_pass() -> ()", [] { pagoda::torch::Passes::instance().mark_scaled(); });
  library.def("optimizer_constants(str kind) -> Dict(str, float)", [](const std::string& kind) {
    return pagoda::torch::translating_errors([&] { return pagoda::torch::constants_of(kind); });
  });
  library.class_<BoundInterpreter>("Interpreter")
      .def(torch::init<>())
      .def("ends", &BoundInterpreter::ends);
  library.class_<BoundPin>("Pin").def(torch::init<>()).def("release", &BoundPin::release);
  library.class_<BoundRegionPages>("RegionPages")
      .def(torch::init<std::vector<at::Tensor>, std::vector<at::Tensor>>())
      .def("release", &BoundRegionPages::release);
  library.class_<BoundSaved>("Saved").def(torch::init<>()).def("restore", &BoundSaved::restore);
  library.class_<BoundActivations>("Activations")
      .def(torch::init<>())
      .def("keep", &BoundActivations::keep)
      .def("sweep", &BoundActivations::sweep)
      .def("flush", &BoundActivations::flush)
      .def("pause", &BoundActivations::pause);
  library.class_<BoundEngine>("Engine")
      .def(torch::init<std::string, std::optional<BoundEngine::Group>,
                       std::optional<BoundEngine::Group>, bool>())
      .def("require_may_close", &BoundEngine::require_may_close)
      .def("close", &BoundEngine::close)
      .def("begin_build", &BoundEngine::begin_build)
      .def("end_build", &BoundEngine::end_build)
      .def("adopt", &BoundEngine::adopt)
      .def("attach", &BoundEngine::attach)
      .def("attached", &BoundEngine::attached)
      .def("release", &BoundEngine::release)
      .def("backward", &BoundEngine::backward)
      .def("step", &BoundEngine::step)
      .def("join", &BoundEngine::join)
      .def("finish", &BoundEngine::finish)
      .def("barrier", &BoundEngine::barrier)
      .def("begin_call", &BoundEngine::begin_call)
      .def("end_call", &BoundEngine::end_call)
      .def("begin_work", &BoundEngine::begin_work)
      .def("end_work", &BoundEngine::end_work)
      .def("open_calls", &BoundEngine::open_calls)
      .def("taken", &BoundEngine::taken)
      .def("fail", &BoundEngine::fail)
      .def("waited_for_ranks", &BoundEngine::waited_for_ranks)
      .def("zero_grad", &BoundEngine::zero_grad)
      .def("has_gradients", &BoundEngine::has_gradients)
      .def("set_loss_is_scaled", &BoundEngine::set_loss_is_scaled)
      .def("set_clip", &BoundEngine::set_clip)
      .def("set_optimizer", &BoundEngine::set_optimizer)
      .def("require_changeable", &BoundEngine::require_changeable)
      .def("loss_scale", &BoundEngine::loss_scale)
      .def("grad", &BoundEngine::grad)
      .def("grad_norm", &BoundEngine::grad_norm)
      .def("pin", &BoundEngine::pin)
      .def("activations", &BoundEngine::activations)
      .def("stats", &BoundEngine::stats)
      .def("stats_table", &BoundEngine::stats_table)
      .def("config", &BoundEngine::config)
      .def("device", &BoundEngine::device)
      .def("rank", &BoundEngine::rank)
      .def("world_size", &BoundEngine::world_size);
}
