// SPDX-License-Identifier: Apache-2.0
// An engine with a model of the zoo in it, driven call by call: for tests of what goes wrong.
// Includes no torch.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "pagoda/comm/world.h"
#include "pagoda/engine/config.h"
#include "pagoda/engine/stats.h"
#include "torch/plain_loop.h"

namespace zoo {

/// One rank that trains: an engine, and a model built in it. One thread uses it. Its batches are
/// those of plain_loop(), its rule is Adam's.
class Trainee {
 public:
  enum class Start : std::uint8_t { Attached, Empty };

  /// With Start::Attached, build() is called. `world` null: alone.
  Trainee(const Options& options, const Training& training, const pagoda::Config& config,
          std::shared_ptr<pagoda::comm::World> world = nullptr, Start start = Start::Attached);
  Trainee(const Trainee&) = delete;
  Trainee& operator=(const Trainee&) = delete;
  ~Trainee();

  /// Builds the model in the engine and attaches it.
  void build();
  /// The bits of the loss; its graph waits for backward().
  std::uint32_t forward(int step, int micro_batch = 0);
  void backward();
  void step();
  void join();
  void finish();
  /// A whole step of one micro-batch; the bits of its loss.
  std::uint32_t train(int step);

  /// Reads all parameters by operators.
  std::vector<Bits> parameters() const;
  pagoda::engine::Stats stats() const;
  /// Another model of the same kind as this one's comes and goes within the engine's build scope.
  void build_and_drop();
  /// Reads a parameter's memory without an operator.
  void read_raw_pointer() const;
  void end_engine();
  void drop_model();

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

/// How a call ended.
struct Ending {
  bool threw = false;
  bool by_torch = false;  ///< a c10::Error: an operator threw
  std::string text;       ///< what() of what it threw
};
Ending ending_of(const std::function<void()>& call);

/// Whether torch gives so much memory on a device.
bool torch_can_take(pagoda::Bytes bytes, std::string_view device);

/// Budgets so small that pages come and go all the time: `resident` times the largest page.
pagoda::Config crowded(const Options& options, unsigned resident = 3);

/// Ranks that are threads of this process and talk over Gloo, through a store in memory.
std::vector<std::shared_ptr<pagoda::comm::World>> gloo_worlds(int ranks);
/// The world of this process's environment, for several processes on this machine.
std::shared_ptr<pagoda::comm::World> world_of_environment();

/// A number that tells results apart: losses, then parameters.
std::uint64_t fingerprint(const std::vector<std::uint32_t>& losses,
                          const std::vector<Bits>& parameters);

}  // namespace zoo
