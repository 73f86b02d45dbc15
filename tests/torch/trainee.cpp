// SPDX-License-Identifier: Apache-2.0
#include "torch/trainee.h"

#include <bit>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/nn/module.h>

#include "pagoda/base/error.h"
#include "pagoda/comm/solo_world.h"
#include "pagoda/io/checksum.h"
#include "pagoda/torch/engine.h"
#include "pagoda/torch/gloo_world.h"
#include "torch/paged_loop.h"
#include "torch/specimen.h"

namespace zoo {

struct Trainee::Parts {
  Options options;
  Training training;
  int rank = 0;
  std::unique_ptr<pagoda::Engine> engine;
  std::shared_ptr<::torch::nn::Module> model;
  at::Tensor loss;
};

Trainee::Trainee(const Options& options, const Training& training, const pagoda::Config& config,
                 std::shared_ptr<pagoda::comm::World> world, Start start)
    : parts_(std::make_unique<Parts>()) {
  use_one_torch_thread();
  if (world == nullptr) world = pagoda::comm::make_solo_world();
  parts_->options = options;
  parts_->training = training;
  parts_->rank = world->rank();
  pagoda::Config mine = config;
  mine.seed = training.update_seed;
  parts_->engine = std::make_unique<pagoda::Engine>(mine, std::move(world));
  if (start == Start::Attached) build();
}

void Trainee::build() {
  parts_->model = parts_->engine->build([&] { return make(parts_->options); });
  const auto& rule = std::get<pagoda::kernels::AdamConfig>(parts_->training.optimizer);
  PAGODA_REQUIRE(rule.decay == pagoda::kernels::Decay::Decoupled);
  parts_->engine->attach(
      *parts_->model, pagoda::AdamW{rule.lr, rule.beta1, rule.beta2, rule.eps, rule.weight_decay});
}

Trainee::~Trainee() = default;

std::uint32_t Trainee::forward(int step, int micro_batch) {
  const std::uint64_t seed =
      batch_seed(parts_->training.data_seed, parts_->rank, step, micro_batch);
  parts_->loss = loss(*parts_->model, seed);
  return std::bit_cast<std::uint32_t>(parts_->loss.item<float>());
}

void Trainee::backward() {
  parts_->engine->backward(std::exchange(parts_->loss, at::Tensor()));
}

void Trainee::step() {
  parts_->engine->step();
}

void Trainee::join() {
  parts_->engine->join();
}

void Trainee::finish() {
  parts_->engine->finish();
}

std::uint32_t Trainee::train(int step) {
  const std::uint32_t bits = forward(step);
  backward();
  this->step();
  return bits;
}

std::vector<Bits> Trainee::parameters() const {
  return parameter_bits(*parts_->model);
}

pagoda::engine::Stats Trainee::stats() const {
  return parts_->engine->stats();
}

void Trainee::build_and_drop() {
  parts_->engine->build([&] { return make(parts_->options); }).reset();
}

void Trainee::read_raw_pointer() const {
  (void)parts_->model->parameters().front().const_data_ptr();
}

void Trainee::end_engine() {
  parts_->engine.reset();
}

void Trainee::drop_model() {
  parts_->loss = at::Tensor();
  parts_->model.reset();
}

Ending ending_of(const std::function<void()>& call) {
  try {
    call();
    return {};
  } catch (const c10::Error& error) {
    return {true, true, error.what()};
  } catch (const std::exception& error) {
    return {true, false, error.what()};
  }
}

bool torch_can_take(pagoda::Bytes bytes, std::string_view device) {
  return !ending_of([&] {
            (void)at::empty({static_cast<std::int64_t>(bytes)},
                            at::TensorOptions().dtype(at::kByte).device(std::string(device)));
          }).threw;
}

pagoda::Config crowded(const Options& options, unsigned resident) {
  const pagoda::Bytes largest = model_bytes(options).largest;
  pagoda::Config config;
  config.device = "cpu";
  config.gradient_staging = largest;
  config.device_budget = (resident + 1) * (largest + 4096);
  config.parameters = pagoda::Placement::Host;
  config.fetch_threads = 2;
  config.update_threads = 1;
  config.staging = 64 * 1024;
  config.update_chunk = 64 * 1024;
  config.update_buffers = 2;
  config.bucket = 64 * 1024;
  config.timeout = 20;
  config.heartbeat = 0.1;
  return config;
}

std::vector<std::shared_ptr<pagoda::comm::World>> gloo_worlds(int ranks) {
  const auto store = c10::make_intrusive<::c10d::HashStore>();
  std::vector<std::shared_ptr<pagoda::comm::World>> worlds;
  for (int r = 0; r < ranks; ++r) {
    worlds.push_back(pagoda::torch::world_from_store(store, r, ranks, {.address = "127.0.0.1"}));
  }
  return worlds;
}

std::shared_ptr<pagoda::comm::World> world_of_environment() {
  using std::chrono::milliseconds;
  return pagoda::torch::world_from_env(
      {.address = "127.0.0.1", .board_timeout = milliseconds(3000), .linger = milliseconds(500)});
}

std::uint64_t fingerprint(const std::vector<std::uint32_t>& losses,
                          const std::vector<Bits>& parameters) {
  constexpr std::uint64_t kMix = 0x9E3779B97F4A7C15U;
  std::uint64_t out = pagoda::io::checksum(std::as_bytes(std::span(losses)));
  for (const Bits& bits : parameters) out = out * kMix + pagoda::io::checksum(bits.bytes);
  return out;
}

}  // namespace zoo
