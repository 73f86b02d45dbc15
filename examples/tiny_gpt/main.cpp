// SPDX-License-Identifier: Apache-2.0
// Trains a GPT whose parameters, gradients and optimizer state lie on disk, and shows that nothing
// changed but where the bytes are.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <vector>

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include "flags.h"
#include "interrupt.h"
#include "pace.h"
#include "pagoda/base/error.h"
#include "pagoda/base/log.h"
#include "placement.h"
#include "progress.h"
#include "report.h"
#include "text.h"
#include "training.h"

namespace tiny_gpt {
namespace {

constexpr pagoda::Bytes kTextLimit = pagoda::Bytes{8} << 20;

void say(const std::string& text) {
  fmt::print("{}", text);
  std::fflush(stdout);
}

/// Steps until the flags say that it is enough; returns every loss.
std::vector<float> train(Training& training, const Flags& flags, std::int64_t steps) {
  std::vector<float> losses;
  Progress progress(stdout);
  Pace pace(steps, steps > 0 ? 0 : flags.seconds, flags.batch * flags.sequence);
  while (!pace.over() && !interrupted()) {
    losses.push_back(training.step());
    progress.show(pace.step(losses.back(), training.seconds_in_step(), training.engine().stats()));
  }
  progress.finish();
  return losses;
}

void demo(const Flags& flags) {
  const Text text = flags.text.empty() ? Text::collect(Text::usual_places(), kTextLimit)
                                       : Text::load(flags.text, kTextLimit);
  text.require_length(static_cast<std::size_t>(flags.sequence));
  Training training(paged(flags), flags, text);
  say(opening(flags, training.parameters(), text));
  const std::vector<float> losses = train(training, flags, flags.steps);
  training.engine().finish();
  const pagoda::engine::Stats stats = training.engine().stats();
  if (interrupted()) return;
  say(where_bytes_lived(stats, training.parameters()));
  say(what_overlapped(stats, training.seconds_in_step()));

  const auto compared = std::min(flags.repeat, static_cast<std::int64_t>(losses.size()));
  if (compared > 0) {
    say("\nThe first steps again, with everything in memory\n");
    Training again(resident(flags), flags, text);
    const std::vector<float> same = train(again, flags, compared);
    if (interrupted()) return;
    say(comparison(losses, same));
    if (!same_bits(losses, same)) throw pagoda::EngineError("paging changed the numbers");
  }
  if (flags.sample > 0) {
    say("\nWhat it writes, its parameters still on disk\n");
    say(indented(printable(training.write(flags.sample))));
  }
  say(closing(stats, training.parameters(), losses, compared));
}

}  // namespace
}  // namespace tiny_gpt

int main(int argc, char** argv) {
  tiny_gpt::watch_for_interrupts();
  if (std::getenv("PAGODA_LOG") == nullptr) pagoda::log::set_level(pagoda::log::Level::Off);
  try {
    if (const auto flags = tiny_gpt::parse_flags(argc, argv)) tiny_gpt::demo(*flags);
  } catch (const pagoda::UserError& error) {
    fmt::print(stderr, "tiny_gpt: {}\n", error.message());
    return 2;
  } catch (const c10::Error& error) {  // of an operator: what the engine told it
    fmt::print(stderr, "tiny_gpt: {}\n", error.what_without_backtrace());
    return 2;
  } catch (const std::exception& error) {
    fmt::print(stderr, "tiny_gpt: {}\n", error.what());
    return 1;
  }
  return 0;
}
