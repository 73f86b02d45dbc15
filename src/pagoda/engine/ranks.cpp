// SPDX-License-Identifier: Apache-2.0
#include "pagoda/engine/ranks.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace pagoda::engine {
namespace {

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
      std::chrono::duration<double>(seconds));
}

}  // namespace

Ranks::Ranks(std::shared_ptr<comm::World> world)
    : world_(std::move(world)), number_(world_->next_number()), failure_(*world_, name()) {}

void Ranks::connect(double timeout, double join_timeout) {
  world_->begin_join(milliseconds(timeout), milliseconds(join_timeout));
  for (auto& [group, name] : {std::pair(&calls_, "calls"), std::pair(&control_, "control"),
                              std::pair(&gradients_, "gradients")}) {
    *group = world_->make_group(name);
    failure_.listen([made = group->get()](const auto&, const auto& why) { made->abort(why); });
  }
}

void Ranks::watch(Watching watching) {
  watching_ = std::move(watching);
  world_->limit_waits(milliseconds(watching_.timeout));
  comm::Watch::Options options;
  options.name = name();
  options.timeout = milliseconds(watching_.timeout);
  options.interval = milliseconds(watching_.heartbeat);
  options.note = [this] { return status_.note(watching_.activity); };
  options.on_notes = [this](std::span<const comm::PeerNote> notes) { look_at_others(notes); };
  watch_ = std::make_unique<comm::Watch>(*world_, options, [this](int rank, std::string reason) {
    failure_.lost(rank);
    failure_.fail(std::make_exception_ptr(RankFailed(failure_.describe(rank, std::move(reason)))));
  });
  failure_.listen([this](const auto&, const auto& why) { watch_->fail(why); });
}

/// On the watch's thread.
void Ranks::look_at_others(std::span<const comm::PeerNote> notes) {
  const Nanos timeout =
      std::chrono::nanoseconds(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::duration<double>(watching_.timeout)))
          .count();
  others_.store(RankStatus::others(notes, timeout));
  const auto idle = RankStatus::idle_peer(
      notes, status_.in_call().value_or(watching_.in_backward()), rank(), waited(), timeout);
  if (idle) failure_.fail(std::make_exception_ptr(Diverged(*idle)));
}

Nanos Ranks::waited() const noexcept {
  Nanos most = 0;
  for (const comm::Group* group : {calls_.get(), control_.get(), gradients_.get()}) {
    if (group != nullptr) most = std::max(most, group->waited());
  }
  return most;
}

void Ranks::require_equal(const Settings& settings) {
  world_->finish_join([&] { settings.require_equal(*control_); },
                      [&](const std::string& why) { control_->abort(why); });
}

void Ranks::give_up(const std::exception_ptr& error) {
  world_->give_up(story_of(error, rank()));
  comm::Watch::fail(*world_, name(), message_of(error));
}

void Ranks::end(const std::string& why) {
  if (watch_ != nullptr) watch_->leave();
  for (comm::Group* group : {calls_.get(), control_.get(), gradients_.get()}) {
    if (group != nullptr) group->abort(why);
  }
}

void Ranks::disconnect() {
  calls_.reset();
  control_.reset();
  gradients_.reset();
}

}  // namespace pagoda::engine
