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
#include "pagoda/torch/large_blocks.h"
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
  torch::PageStorage& adopt_of(const std::vector<NamedTensor>& model, const std::string& name,
                               const at::Tensor& tensor);
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

  engine::Runtime& runtime() noexcept { return *runtime_; }
  /// Copies activations; made when it is first asked for.
  ThreadPool& activation_pool();
  /// Where a page of this engine is, as torch says it.
  c10::Device device() const;

 private:
  /// A parameter that is trained.
  struct Parameter {
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
    std::string name;
    torch::PageStorage* storage = nullptr;
    optim::TrainedPage* page = nullptr;
    std::size_t in_page = 0;                             // which of the page's parameters
    void* hook = nullptr;                                // ours: checked at each step
    std::unique_ptr<torch::AttachedParameter> attached;  // in the observer's table
    const c10::TensorImpl* key = nullptr;                // …under this, dead or alive
    // How often its hook fires in a backward pass: more than once when checkpoints recompute and
    // the parameter is used in several of them.
    std::size_t fires = 0;  // expected; 0: not known yet
    std::size_t fired = 0;  // in this pass
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
  std::vector<optim::Segment> segments_of(const at::Tensor& tensor, std::size_t in_page) const;
  void take_gradient(Parameter& parameter, const at::Tensor& tensor);
  void push(optim::TrainedPage& page, at::Tensor flat, std::vector<bool> present);
  int plain_pass();
  void end_of_backward();
  void check_hooks();
  void sweep();
  torch::PageStorage* find(const at::Tensor& tensor) const;
  void bump(pager::Page& page);

  std::optional<torch::LargeBlocks> large_blocks_;  // where the device is the host
  std::unique_ptr<engine::Runtime> runtime_;
  std::unique_ptr<ThreadPool> activation_pool_;
  std::shared_ptr<void> limit_;  // of torch's own memory on the device, where one is set
  std::unordered_map<const c10::StorageImpl*, std::unique_ptr<torch::PageStorage>> storages_;
  std::unordered_map<const c10::StorageImpl*, Moved> moved_;
  std::vector<Parameter> parameters_;
  std::unordered_map<const pager::Page*, std::vector<std::size_t>> of_page_;
  std::unordered_map<const optim::TrainedPage*, Partial> partial_;  // guarded by gradient_mutex_
  std::vector<int> plain_passes_;  // begun by the user; guarded by gradient_mutex_
  std::mutex gradient_mutex_;
  std::atomic<int> pass_{-1};  // the backward pass under way, where it is ours
  std::unordered_map<void*, std::shared_ptr<device::Stream>> streams_;  // guarded by stream_mutex_
  std::mutex stream_mutex_;
  unsigned backwards_ = 0;  // since the last step
  std::size_t births_ = 0;
  std::size_t births_since_sweep_ = 0;
};

}  // namespace pagoda
