// SPDX-License-Identifier: Apache-2.0
#include "pagoda/torch/backend_group.h"

#include <atomic>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "pagoda/base/bytes.h"
#include "pagoda/base/error.h"

namespace pagoda::torch {
namespace {

using comm::Transfer;

class BackendGroup final : public comm::Group {
 public:
  BackendGroup(c10::intrusive_ptr<::c10d::Backend> backend, std::string name, c10::Device device)
      : Group(backend->getRank(), backend->getSize(), std::move(name)),
        backend_(std::move(backend)),
        device_(device) {
    if (device_.is_cpu()) return;
    const c10::impl::VirtualGuardImpl guard(device_.type());
    stream_ = guard.getStreamFromGlobalPool(device_, /*isHighPriority=*/false);
  }

  Bytes buffer_bytes() const noexcept override {
    return buffer_bytes_.load(std::memory_order_relaxed);
  }

 private:
  void do_exchange(std::span<const Transfer> transfers) override {
    const at::DisableRecordFunctionGuard unseen;
    const c10::InferenceMode no_autograd;
    std::optional<c10::StreamGuard> on_stream;
    if (stream_) on_stream.emplace(*stream_);
    try {
      move(transfers);
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      check_alive();
      const std::string text = error.what();
      throw EngineError(
          fmt::format("{} failed: {}", backend_->getBackendName(), text.substr(0, text.find('\n'))),
          {context("group", name())});
    }
  }

  void move(std::span<const Transfer> transfers) {
    Bytes sent = 0;
    Bytes received = 0;
    for (const Transfer& transfer : transfers)
      (transfer.sends() ? sent : received) += transfer.bytes();
    grow(out_, sent);
    grow(in_, received);
    std::vector<at::Tensor> pieces;  // of out_ and in_, for each transfer
    std::int64_t out = 0;
    std::int64_t in = 0;
    for (const Transfer& transfer : transfers) {
      const auto bytes = static_cast<std::int64_t>(transfer.bytes());
      std::int64_t& at = transfer.sends() ? out : in;
      pieces.push_back((transfer.sends() ? out_ : in_).narrow(0, at, bytes));
      at += bytes;
      if (transfer.sends()) pieces.back().copy_(over(transfer.out.data(), bytes));
    }
    // In one batch: a send that waits for its receiver must not hold up this rank's receives.
    const bool batch = backend_->supportsCoalescing();
    std::vector<c10::intrusive_ptr<::c10d::Work>> works;
    if (batch) backend_->startCoalescing();
    for (std::size_t i = 0; i < transfers.size(); ++i) {
      const auto tag = static_cast<int>(transfers[i].tag);
      std::vector<at::Tensor> piece{pieces[i]};
      works.push_back(transfers[i].sends() ? backend_->send(piece, transfers[i].peer, tag)
                                           : backend_->recv(piece, transfers[i].peer, tag));
    }
    if (batch) works = {backend_->endCoalescing()};
    for (const auto& work : works) {
      if (work.defined()) work->wait();
    }
    for (std::size_t i = 0; i < transfers.size(); ++i) {
      if (transfers[i].sends()) continue;
      over(transfers[i].in.data(), static_cast<std::int64_t>(transfers[i].bytes()))
          .copy_(pieces[i]);
    }
    if (stream_) stream_->synchronize();  // also for what was only sent: its buffer is used again
    check_alive();
  }

  int do_recv_any(comm::Tag /*tag*/, std::span<std::byte> /*data*/) override {
    throw EngineError(fmt::format("{} cannot receive from any rank", backend_->getBackendName()),
                      {context("group", name())});
  }

  void do_abort() noexcept override {
    try {
      backend_->abort();
    } catch (const std::exception&) {  // it has ended by itself
    }
  }

  /// No larger than what the callers send at a time: `bucket`, and some flags for each page.
  void grow(at::Tensor& buffer, Bytes bytes) {
    const Bytes before = buffer.defined() ? static_cast<Bytes>(buffer.numel()) : 0;
    if (buffer.defined() && before >= bytes) return;
    buffer = at::Tensor();  // before the next one is taken
    buffer = at::empty({static_cast<std::int64_t>(bytes)},
                       at::TensorOptions().dtype(at::kByte).device(device_));
    buffer_bytes_.fetch_add(bytes - before, std::memory_order_relaxed);
  }

  static at::Tensor over(const std::byte* data, std::int64_t bytes) {
    return at::from_blob(const_cast<std::byte*>(data), {bytes},
                         at::TensorOptions().dtype(at::kByte));
  }

  const c10::intrusive_ptr<::c10d::Backend> backend_;
  const c10::Device device_;
  std::optional<c10::Stream> stream_;  // none on the host
  at::Tensor out_;                     // one collective at a time
  at::Tensor in_;
  std::atomic<Bytes> buffer_bytes_{0};  // of both
};

}  // namespace

std::unique_ptr<comm::Group> make_backend_group(c10::intrusive_ptr<::c10d::Backend> backend,
                                                std::string name, c10::Device device) {
  return std::make_unique<BackendGroup>(std::move(backend), std::move(name), device);
}

}  // namespace pagoda::torch
