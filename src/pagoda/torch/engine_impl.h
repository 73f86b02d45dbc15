// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

#include "pagoda/engine/runtime.h"
#include "pagoda/torch/engine.h"
#include "pagoda/torch/observer.h"
#include "pagoda/torch/page_storage.h"

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
  void attach(const std::vector<NamedTensor>& model, std::vector<ParameterGroup> groups);
  void release(const std::vector<at::Tensor>& model);

  /// Sparse gradients are not paged: said before attach(), not when the first one comes.
  static void check_modules(const ::torch::nn::Module& model);

  void backward(const at::Tensor& loss, std::optional<bool> last);
  StepReport step(bool joining);
  at::Tensor grad(const at::Tensor& tensor);
  std::shared_ptr<void> pin(const at::Tensor& tensor);

  /// A parameter's gradient has been accumulated: called by its hook.
  void gradient_ready(std::size_t parameter, const at::Tensor& tensor);

  void zero_grad();
  /// Hands over what was thawed during a pass, and is still in p.grad.
  void push_late();

  engine::Runtime& runtime() noexcept { return *runtime_; }
  /// Copies activations; made when it is first asked for.
  ThreadPool& activation_pool();
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
    const c10::TensorImpl* key = nullptr;                // …under this, dead or alive
    // How often its hook fires in a backward pass: more than once when checkpoints recompute and
    // the parameter is used in several of them.
    std::size_t fires = 0;  // expected; 0: not known yet
    std::size_t fired = 0;  // in this pass
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
    std::optional<kernels::Dtype> dtype;  // none: it cannot be trained
    std::size_t spec = 0;
    std::size_t in_page = 0;
    std::string obstacle;  // to its training, if it is frozen

    bool frozen() const { return !tensor.requires_grad(); }
  };

  /// A page of several parameters collects their gradients here.
  struct Partial {
    at::Tensor flat;
    std::vector<bool> present;
  };

  /// A storage whose bytes went to the engine's device, and the one that has them there.
  struct Moved {
    c10::weak_intrusive_ptr<c10::StorageImpl> from;
    c10::weak_intrusive_ptr<c10::StorageImpl> to;
  };

  void limit_device(Bytes limit);
  void point_at(at::Tensor& tensor, const c10::Storage& storage) const;
  void check_trainable(const at::Tensor& tensor, const std::string& name) const;
  static std::vector<optim::Segment> segments_of(const at::Tensor& tensor, std::size_t in_page);
  void take_gradient(Parameter& parameter, const at::Tensor& tensor);
  void push(optim::TrainedPage& page, at::Tensor flat, std::vector<bool> present);
  int plain_pass();
  void end_of_backward();
  bool is_complete(const Partial& partial, const optim::TrainedPage& page);
  void look_for_thawed();
  void drop_late();
  void forget_thawed();
  void check_hooks();
  static std::vector<engine::TrainedSpec> specs_of(std::vector<Given>& given,
                                                   const std::vector<ParameterGroup>& groups);
  void remove_hooks() noexcept;
  void sweep();
  torch::PageStorage* find(const at::Tensor& tensor) const;
  void bump(pager::Page& page);

  std::unique_ptr<engine::Runtime> runtime_;
  std::unique_ptr<ThreadPool> activation_pool_;
  std::shared_ptr<void> limit_;  // of torch's own memory on the device, where one is set
  std::unordered_map<const c10::StorageImpl*, std::unique_ptr<torch::PageStorage>> storages_;
  std::unordered_map<const c10::StorageImpl*, Moved> moved_;
  std::vector<Parameter> parameters_;
  std::vector<std::size_t> frozen_;  // of parameters_: those whose `frozen` is set
  std::unordered_map<const pager::Page*, std::vector<std::size_t>> of_page_;
  std::unordered_map<const optim::TrainedPage*, Partial> partial_;  // guarded by gradient_mutex_
  std::vector<int> plain_passes_;  // begun by the user; guarded by gradient_mutex_
  bool pushing_late_ = false;      // guarded by gradient_mutex_
  std::mutex gradient_mutex_;
  std::atomic<int> pass_{-1};  // the backward pass under way, where it is ours
  std::unordered_map<void*, std::shared_ptr<device::Stream>> streams_;  // guarded by stream_mutex_
  std::mutex stream_mutex_;
  unsigned backwards_ = 0;  // since the last step
  std::size_t births_ = 0;
  std::size_t births_since_sweep_ = 0;
};

}  // namespace pagoda
