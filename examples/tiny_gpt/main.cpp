// SPDX-License-Identifier: Apache-2.0
// Trains a GPT with a model and a loop that are those of plain torch, but for the engine's calls.
#include <csignal>
#include <cstdio>
#include <exception>

#include <ATen/ops/from_blob.h>
#include <fmt/format.h>
#include <torch/utils.h>
#include <unistd.h>

#include "flags.h"
#include "gpt.h"
#include "pagoda/base/clock.h"
#include "pagoda/base/error.h"
#include "plain_engine.h"
#include "progress.h"
#include "text.h"

namespace tiny_gpt {
namespace {

namespace api = plain;  // the engine's place: what `api` names is all that changes

constexpr pagoda::Bytes kTextLimit = pagoda::Bytes{8} << 20;
volatile std::sig_atomic_t interrupted = 0;

/// The first signal ends training after its step, a second one the program.
void on_signal(int signal) {
  if (interrupted != 0) {
    Progress::restore_cursor();
    _exit(128 + signal);
  }
  interrupted = 1;
}

at::Tensor tensor_of(const std::vector<std::int64_t>& values, const Batch& batch) {
  const auto rows = static_cast<std::int64_t>(batch.sequences);
  const auto columns = static_cast<std::int64_t>(batch.length);
  return at::from_blob(const_cast<std::int64_t*>(values.data()), {rows, columns}, at::kLong)
      .clone();
}

void train(const Flags& flags) {
  const Text text = flags.text.empty() ? Text::collect(Text::usual_places(), kTextLimit)
                                       : Text::load(flags.text, kTextLimit);
  static_cast<void>(text.batch(1, static_cast<std::size_t>(flags.sequence), 0));  // long enough?
  torch::manual_seed(flags.seed);
  api::Engine engine({flags.directory.string(), flags.device_budget, flags.host_budget},
                     api::world_from_env());
  Gpt model = engine.build([&] { return Gpt(GptOptions{.sequence = flags.sequence}); });
  engine.attach(*model, api::AdamW{.lr = flags.lr});
  fmt::print("{:.1f} M parameters; {} of text from {} files\n",
             static_cast<double>(model->parameter_count()) * 1e-6,
             pagoda::format_bytes(text.bytes().size()), text.files());

  Progress progress(stdout);
  const pagoda::Stopwatch clock;
  const auto over = [&](std::int64_t step) {
    return interrupted ||
           (flags.steps > 0 ? step == flags.steps : clock.seconds() >= flags.seconds);
  };
  double recent_loss = 0;  // one batch is small: show the mean of the last ones
  for (std::int64_t step = 0; !over(step);) {
    const Batch batch =
        text.batch(static_cast<std::size_t>(flags.batch), static_cast<std::size_t>(flags.sequence),
                   flags.seed + static_cast<std::uint64_t>(step));
    const at::Tensor loss =
        model->loss(tensor_of(batch.inputs, batch), tensor_of(batch.targets, batch));
    engine.backward(loss);
    engine.step();
    const double value = loss.item<double>();
    recent_loss = step == 0 ? value : 0.9 * recent_loss + 0.1 * value;
    ++step;

    const api::Stats stats = engine.stats();
    const double spent = clock.seconds();
    const double per_step = spent / static_cast<double>(step);
    progress.show(
        {.step = step,
         .steps = flags.steps,
         .loss = recent_loss,
         .tokens_per_second = static_cast<double>(flags.batch * flags.sequence) / per_step,
         .stall = stats.stall_seconds / spent,
         .device = stats.device_bytes,
         .host = stats.host_bytes,
         .nvme = stats.nvme_bytes,
         .seconds_left = flags.steps > 0 ? per_step * static_cast<double>(flags.steps - step)
                                         : flags.seconds - spent});
  }
  progress.finish();
  engine.finish();
  if (flags.sample > 0 && interrupted == 0) {
    fmt::print("\n{}\n", printable(model->generate("\n", flags.sample, 0.8, flags.seed)));
  }
  engine.release(*model);
}

}  // namespace
}  // namespace tiny_gpt

int main(int argc, char** argv) {
  std::signal(SIGINT, tiny_gpt::on_signal);
  std::signal(SIGTERM, tiny_gpt::on_signal);
  try {
    if (const auto flags = tiny_gpt::parse_flags(argc, argv)) tiny_gpt::train(*flags);
  } catch (const pagoda::UserError& error) {
    fmt::print(stderr, "tiny_gpt: {}\n", error.message());
    return 2;
  } catch (const std::exception& error) {
    fmt::print(stderr, "tiny_gpt: {}\n", error.what());
    return 1;
  }
  return 0;
}
