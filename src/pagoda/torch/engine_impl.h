// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>

#include "pagoda/base/ranked_mutex.h"
#include "pagoda/engine/runtime.h"
#include "pagoda/torch/engine.h"
#include "pagoda/torch/large_blocks.h"
#include "pagoda/torch/observer.h"
#include "pagoda/torch/page_storages.h"
#include "pagoda/torch/pass_events.h"

namespace pagoda {

/// Ties torch's tensors to the runtime: which storages are pages, which parameters give gradients.
class Engine::Impl final : public torch::ObserverClient {
 public:
  Impl(const Config& config, std::shared_ptr<comm::World> world);
  ~Impl() override;

  std::string touch_failed(std::exception_ptr error) noexcept override;
  std::shared_ptr<device::Stream> consumer() override;
  void storage_exchanged(std::size_t parameter) override;

  /// Makes the tensor's storage a page, if it is none yet.
  torch::PageStorage& adopt(const at::Tensor& tensor, const std::string& name);
  torch::PageStorage& adopt_of(const std::vector<NamedTensor>& model, const std::string& name,
                               const at::Tensor& tensor);
  void attach(const std::vector<NamedTensor>& model, std::vector<ParameterGroup> groups,
              const std::vector<NamedTensor>& buffers, const std::function<void()>& begin);
  void release(const std::vector<at::Tensor>& model, const std::string& refusal);
  std::string close(bool give_back) noexcept;

  /// What Engine says of them; any thread.
  void stop_calls() noexcept { closing_ = true; }
  std::string call_under_way();
  bool runs_plain_pass() const;
  bool is_in_call(bool of_this_thread);
  void require_no_call_around(const char* call);

  /// Sparse gradients are not paged: said before attach(), not when the first one comes.
  static void check_modules(const ::torch::nn::Module& model);

  void backward(const at::Tensor& loss, std::optional<bool> last, bool retain_graph);
  StepReport step(bool joining);
  at::Tensor grad(const at::Tensor& tensor);
  std::shared_ptr<void> pin(const at::Tensor& tensor, bool write = false);

  /// A parameter's gradient is about to be accumulated, and has been: called by its hooks.
  void gradient_comes(std::size_t parameter);
  void gradient_ready(std::size_t parameter, const at::Tensor& tensor);

  void zero_grad();
  double grad_norm();
  /// Whether a gradient has come since the last step.
  bool has_gradients();
  /// Calls of somebody else's, as Engine::begin_call() and begin_work() tell of them: one thread is
  /// in them, as in any other call.
  void begin_call(const std::string& label, const std::string& name, const std::string& argument);
  void end_call(const std::string& error);
  void begin_work(const std::string& label);
  void end_work();
  /// How many of these have begun and not ended.
  std::size_t open_calls();
  void barrier();

  /// Passes that begin while it is set have a loss that was multiplied by loss_scale().
  void set_loss_is_scaled(bool scaled) noexcept { loss_is_scaled_ = scaled; }

  engine::Runtime& runtime() noexcept { return *runtime_; }
  /// Made when it is first asked for, by any thread.
  const std::shared_ptr<torch::ActivationStore>& activations();
  /// Where a page of this engine is, as torch says it.
  c10::Device device() const;

 private:
  /// A parameter that is given to the optimizer: trained, or frozen for now.
  struct Parameter {
    explicit Parameter(const at::Tensor& of) : tensor(of.getIntrusivePtr()) {}

    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
    std::string name;
    torch::PageStorage* storage = nullptr;
    optim::TrainedPage* page = nullptr;                  // null: frozen, and cannot be trained
    std::size_t in_page = 0;                             // which of the page's parameters
    void* hook = nullptr;                                // ours: checked at each step
    std::unique_ptr<torch::AttachedParameter> attached;  // in the observer's table
    std::vector<std::int64_t> strides;                   // which gradients and state follow
    at::ScalarType dtype = at::kFloat;                   // the page's
    c10::Storage shut;                     // guarded by exchange_mutex_: see refuse_in_capture()
    const c10::TensorImpl* key = nullptr;  // …under this, dead or alive
    // Guarded by gradient_mutex_, as is all below, while a pass is under way.
    std::size_t fired = 0;    // in this pass: how often a gradient has been accumulated
    std::size_t taken = 0;    // of `fired`, when somebody began to take its gradient
    bool given = false;       // it has a gradient in this step
    bool left = false;        // p.grad has what a pass that failed has left there
    bool coming = false;      // it is being accumulated: hooks of the user's may fail before ours
    device::Mark held;        // behind its gradient, where that is not taken yet
    bool unforeseen = false;  // it came again, nobody knows why: taken when the pass ends
    // Of one that was frozen at attach() and that step() has not agreed to train yet: see
    // docs/notes/thaw.md.
    std::optional<std::size_t> frozen;  // its place among them, as the runtime knows it
    bool thawed = false;                // when the runtime was last told
    bool late = false;                  // thawed during a pass: p.grad is taken by step()
  };
  /// One of the parameters that attach() gives to the optimizer.
  struct Given {
    at::Tensor tensor;
    std::string name;
    std::uint32_t index = 0;  // in the model
    std::uint32_t group = 0;
    torch::PageStorage* storage = nullptr;
    std::size_t spec = 0;
    std::size_t in_page = 0;
    std::string obstacle;  // to its training, if it is frozen

    bool frozen() const { return !tensor.requires_grad(); }
  };
  /// A page of several parameters collects their gradients here.
  struct Partial {
    at::Tensor flat;
    std::vector<bool> present;
    device::Mark summed;  // behind what has been added last
  };

  /// A call that must not come while another thread is in one, unless it comes from inside that.
  class Calling {
   public:
    /// `pass`: that the call runs, where it runs one.
    Calling(Impl& engine, const char* call, const std::atomic<int>* pass = nullptr);
    Calling(const Calling&) = delete;
    Calling& operator=(const Calling&) = delete;
    ~Calling();

    const char* call() const noexcept { return call_; }
    bool is_around_this_thread() const;

   private:
    Impl& engine_;
    const char* const call_;
    const std::atomic<int>* const pass_;
    const std::thread::id thread_ = std::this_thread::get_id();
    const Calling* around_ = nullptr;
  };

  /// While a parameter's hook runs: before a pass of the user's is known, that is all that tells of
  /// it.
  class InHook {
   public:
    explicit InHook(Impl& engine) : engine_(engine) { ++engine_.hooks_; }
    InHook(const InHook&) = delete;
    InHook& operator=(const InHook&) = delete;
    ~InHook() { --engine_.hooks_; }

   private:
    Impl& engine_;
  };

  /// A call that begins and ends in calls of their own.
  struct OthersCall {
    OthersCall(Impl& engine, const std::string& label)
        : name(label + "()"), calling(engine, name.c_str()) {}

    const std::string name;
    const Calling calling;
  };

  /// While release() or close() gives the storages back.
  class NoExchanges {
   public:
    explicit NoExchanges(Impl& engine);
    NoExchanges(const NoExchanges&) = delete;
    NoExchanges& operator=(const NoExchanges&) = delete;
    ~NoExchanges();

   private:
    Impl& engine_;
  };

  /// A storage whose bytes went to the engine's device, and the one that has them there.
  struct Moved {
    c10::weak_intrusive_ptr<c10::StorageImpl> from;
    c10::weak_intrusive_ptr<c10::StorageImpl> to;
  };

  /// A page as plain bytes: what its storage gets when it is a page no more. Null where they are in
  /// the memory that the storage has kept.
  struct PlainCopy {
    torch::PageStorage* storage = nullptr;
    c10::DataPtr data;
  };

  /// A page that attach() has made, and what it was before.
  struct Adopted {
    torch::PageStorage* storage = nullptr;
    c10::Device device;
    c10::weak_intrusive_ptr<c10::StorageImpl> was;  // alive where it is still in use elsewhere
  };

  using StoragePtr = c10::intrusive_ptr<c10::StorageImpl>;

  /// What a storage had that a parameter has no more: one of them, or neither.
  struct Former {
    pager::Page* page = nullptr;
    std::optional<c10::DataPtr> plain;  // of a PlainCopy
  };

  at::Tensor bytes_of(torch::PageStorage& storage);
  at::Tensor copy_on_device(torch::PageStorage& storage, void* memory = nullptr);
  PlainCopy copy_of(torch::PageStorage& storage);
  template <class Become>
  void end_page(torch::PageStorage& storage, const Become& become);
  void wait_until_unused(const torch::PageStorage& storage);
  void make_lost(torch::PageStorage& storage, const char* why);
  /// Its storage is a plain one again, and nobody uses the page any more.
  void make_plain(PlainCopy& copy);
  void require_host_memory(Bytes bytes) const;
  void drop_exchanged();
  engine::ModelSpec describe(const std::vector<NamedTensor>& model,
                             const std::vector<ParameterGroup>& groups,
                             std::vector<at::Tensor>& given, std::vector<Adopted>& adopted);
  void give_back(const std::vector<NamedTensor>& model, const std::vector<Adopted>& adopted);
  static std::vector<engine::TrainedSpec> specs_of(std::vector<Given>& given,
                                                   const std::vector<ParameterGroup>& groups);
  void watch_parameters(const std::vector<at::Tensor>& given);
  void forget_parameters();
  void limit_device(Bytes limit);
  void require_whole_model(const std::vector<at::Tensor>& model) const;
  void require_ours_or_nobodys(const at::Tensor& tensor, const std::string& name) const;
  static void point_at(at::Tensor& tensor, const c10::Storage& storage, c10::Device device);
  static std::vector<optim::Segment> segments_of(const at::Tensor& tensor, std::size_t in_page);
  void take_gradient(std::size_t index, const at::Tensor& tensor, bool late = false);
  std::optional<Partial> add_to_partial(const Parameter& parameter, const at::Tensor& tensor,
                                        const at::Tensor& grad);
  device::Mark mark_here();
  void wait_here(const device::Mark& made, const at::Tensor& tensor);
  void require_none_set(const Parameter& parameter) const;
  void require_open() const;
  void require_one_pass(const Parameter& parameter) const;
  static bool has_ended(int pass);
  void require_no_other_pass() const;
  void take_set_gradients();
  void require_no_capture(const Parameter& parameter, const at::Tensor& tensor);
  void require_scaled_loss(const Parameter& parameter, const at::Tensor& tensor) const;
  void push(optim::TrainedPage& page, at::Tensor flat, std::vector<bool> present,
            bool late = false);
  void push(const optim::TrainedPage& page, Partial gathered, bool late = false);
  bool claim(Parameter& parameter, const at::Tensor& tensor, bool complete);
  void join_plain_pass();
  void plain_pass_ended();
  void function_ended(const torch::CustomFunctions::Pages* pages) noexcept;
  bool is_complete(const Partial& partial, const optim::TrainedPage& page,
                   std::vector<c10::intrusive_ptr<c10::TensorImpl>>& seen);
  std::unordered_map<const optim::TrainedPage*, Partial> take_partial();
  void look_for_thawed();
  void push_late();
  void forget_thawed();
  void end_of_backward();
  void end_last_pass();
  void rethrow_untaken();
  void backward_failed();
  void end_failed_pass(bool over = true);
  bool forget_failed_passes();
  void drop_gradients();
  void forget_gradients();
  void set_hook(std::size_t index, const at::Tensor& tensor);
  pager::Page& make_page(std::string name, std::uint64_t elements, Bytes element_size,
                         const void* data, c10::Device from);
  torch::PageStorage& make_storage(const c10::Storage& storage, pager::Page& page, bool former);
  Former keep_former(const Parameter& parameter, const StoragePtr& was);
  c10::DataPtr retire_former(const c10::Storage& storage);
  void drop_retired();
  void drop_unused();
  void drop_unless_held(std::vector<pager::Page*> pages);
  void require_exchangeable(const Parameter& parameter, const at::Tensor& tensor,
                            const torch::PageStorage* known) const;
  void exchange(Parameter& parameter, const at::Tensor& tensor, bool with_values);
  [[noreturn]] void refuse_in_capture(Parameter& parameter, const at::Tensor& tensor);
  c10::DataPtr exchange_pinned(Parameter& parameter, const at::Tensor& tensor, const void* values,
                               const StoragePtr& was);
  at::Tensor returning_values(const Parameter& parameter, torch::PageStorage& storage);
  c10::DataPtr take_storage(Parameter& parameter, const at::Tensor& tensor, Former former,
                            const StoragePtr& was);
  void drop_kept_memory();
  std::string take_new_values(std::size_t index, const at::Tensor& tensor);
  static std::optional<at::Tensor> reachable(const Parameter& parameter);
  void check_parameters();
  std::string check_parameter(std::size_t index, const at::Tensor& tensor);
  void require_layout(const Parameter& parameter, const at::Tensor& tensor) const;
  void follow_layout(Parameter& parameter, const at::Tensor& tensor) const;
  void require_page_of_its_kind(const Parameter& parameter, const at::Tensor& tensor) const;
  void sweep();
  bool is_parameters(const torch::PageStorage& storage) const;
  bool is_untrained(const at::Tensor& tensor) const;
  torch::PageStorage* find(const at::Tensor& tensor) const;
  const pager::Page& page_of(const at::Tensor& tensor) const;
  void bump(pager::Page& page);

  std::optional<torch::LargeBlocks> large_blocks_;  // where the device is the host
  std::unique_ptr<engine::Runtime> runtime_;
  std::unique_ptr<ThreadPool> activation_pool_;
  std::once_flag activations_made_;
  std::shared_ptr<torch::ActivationStore> activations_;
  std::shared_ptr<void> limit_;  // of torch's own memory on the device, where one is set
  torch::PageStorages storages_;
  RankedMutex<LockRank::Exchanges> exchange_mutex_;  // one parameter's storage at a time
  bool may_exchange_ = true;                         // guarded by exchange_mutex_
  std::unordered_map<const c10::StorageImpl*, Moved> moved_;
  std::vector<Parameter> parameters_;
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> untrained_;  // the model's in no group
  std::vector<std::size_t> frozen_;  // of parameters_: those whose `frozen` is set
  std::unordered_map<const pager::Page*, std::vector<std::size_t>> of_page_;
  std::unordered_map<const optim::TrainedPage*, Partial> partial_;  // guarded by gradient_mutex_
  std::unordered_set<const optim::TrainedPage*> adding_;  // guarded by gradient_mutex_: taken out
  Condition added_;
  std::shared_ptr<torch::PassEvents> pass_events_ =
      std::make_shared<torch::PassEvents>(torch::PassEvents::Handlers{
          [this](const torch::CustomFunctions::Pages* pages) { function_ended(pages); },
          [this] { plain_pass_ended(); }});
  bool failed_ = false;  // guarded by gradient_mutex_: a pass, and what it left is not handed on
  std::exception_ptr untaken_;  // guarded by gradient_mutex_: why a complete gradient was not taken
  RankedMutex<LockRank::Gradients> gradient_mutex_;
  RankedMutex<LockRank::EngineCalls> calls_mutex_;
  const Calling* calling_ = nullptr;  // guarded by calls_mutex_: the innermost
  std::atomic<int> hooks_{0};         // of parameters, that run
  std::atomic<int> pass_{-1};         // the backward pass under way, where it is ours
  /// close() has begun: whoever calls, or runs a pass, is stopped, and all storages are looked at.
  std::atomic<bool> closing_{false};
  std::atomic<bool> loss_is_scaled_{false};  // of others, by whoever begins them
  std::unordered_map<void*, std::shared_ptr<device::Stream>> streams_;  // guarded by stream_mutex_
  RankedMutex<LockRank::TorchStreams> stream_mutex_;
  unsigned backwards_ = 0;  // since the last step
  bool stepped_ = false;    // since attach()
  std::size_t births_ = 0;
  std::atomic<std::size_t> made_since_sweep_ = 0;
  std::vector<std::unique_ptr<OthersCall>> others_calls_;  // of the thread that is in them
};

}  // namespace pagoda
