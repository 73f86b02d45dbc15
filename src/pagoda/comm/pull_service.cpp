// SPDX-License-Identifier: Apache-2.0
#include "pagoda/comm/pull_service.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <utility>

#include "pagoda/base/log.h"
#include "pagoda/base/start_thread.h"
#include "pagoda/base/trace.h"

namespace pagoda::comm {
namespace {

constexpr Tag kAskTag = 0;
// An answer takes two tags, one for the head and one for the bytes. They come round again after
// half a thousand million pulls.
constexpr Tag kFirstAnswerTag = 2;
constexpr Tag kAnswerTags = (kTags - kFirstAnswerTag) / 2;
constexpr std::size_t kMaxRefusal = 1008;

/// As sent. Ranks run the same program on the same kind of machine: no byte order to agree on.
struct WireAsk {
  std::uint64_t key;
  std::uint64_t version;
  std::uint64_t begin;
  std::uint64_t bytes;
  std::uint64_t tag;
};

/// Before the bytes; sent as far as it is filled. A refusal has its text here, where a receive is
/// posted already: a server never waits for an asker to look. One byte then takes the place of the
/// bytes, so that the receive posted for those ends too.
struct WireHead {
  std::uint64_t refusal_bytes;
  std::uint64_t version_gone;
  std::array<char, kMaxRefusal> refusal;
};

template <class T>
std::span<const std::byte> wire(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

template <class T>
std::span<std::byte> wire_into(T& value) {
  return std::as_writable_bytes(std::span(&value, 1));
}

}  // namespace

void PullReply::give(std::span<const std::byte> data, std::shared_ptr<const void> owner) {
  answered_ = true;
  data_ = data;
  owner_ = std::move(owner);
}

void PullReply::refuse(std::string why) {
  answered_ = true;
  error_ = why.empty() ? "no reason was given" : std::move(why);
}

void PullReply::refuse_version(std::string why) {
  refuse(std::move(why));
  version_gone_ = true;
}

PullService::PullService(std::unique_ptr<Group> group, Handler handler, Options options)
    : group_(std::move(group)), handler_(std::move(handler)), options_(std::move(options)) {
  PAGODA_REQUIRE(group_ != nullptr);
  PAGODA_REQUIRE(handler_ != nullptr);
  PAGODA_REQUIRE_GE(options_.threads, 1u);
  PAGODA_REQUIRE_GE(options_.max_threads, options_.threads);
  if (group_->size() > 1) listener_ = start_thread([this] { listen(); });
}

PullService::~PullService() {
  abort("the pull service has ended");
  if (listener_.joinable()) listener_.join();
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    jobs_.clear();
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void PullService::abort(std::string reason) noexcept {
  stop_.request_stop();
  group_->abort(std::move(reason));
}

void PullService::listen() {
  trace::name_thread("pull/listen");
  try {
    while (true) {
      WireAsk ask{};
      Job job;
      job.request.source = group_->recv_any(kAskTag, wire_into(ask));
      job.request.key = ask.key;
      job.request.version = ask.version;
      job.request.begin = ask.begin;
      job.request.bytes = ask.bytes;
      job.tag = static_cast<Tag>(ask.tag);
      enqueue(job);
    }
  } catch (const std::exception& error) {
    if (stop_.stop_requested()) return;  // whoever ended it has said why
    const std::string reason = fmt::format("the pull service stopped: {}", error.what());
    log::debug("comm", "the pull service stopped", {{"error", error.what()}});
    if (options_.on_failure) options_.on_failure(reason);  // may know a better reason, and abort
    abort(reason);
  }
}

void PullService::enqueue(const Job& job) {
  std::unique_lock lock(mutex_);
  if (stopping_) return;
  jobs_.push_back(job);
  grow(lock);
  wake_.notify_one();
}

void PullService::grow(const RankedLock<LockRank::PullService>&) {
  if (stopping_ || jobs_.size() <= idle_ || workers_.size() >= options_.max_threads) return;
  if (workers_.size() - waiting_ >= options_.threads) return;
  workers_.push_back(start_thread([this] { work(); }));
  ++idle_;  // it will take a job; counted here so that the next request sees it
}

void PullService::work() {
  trace::name_thread("pull/serve");
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (stopping_) return;
    const Job job = jobs_.front();
    jobs_.pop_front();
    --idle_;
    lock.unlock();
    answer(job);
    lock.lock();
    ++idle_;
  }
}

PullReply PullService::ask_handler(const PullRequest& request, std::function<void()> waits) {
  PullReply reply(stop_.get_token(), std::move(waits));
  try {
    handler_(request, reply);
    if (!reply.answered_) reply.refuse("the handler gave no answer");
  } catch (const std::exception& error) {
    reply.refuse(error.what());
  } catch (...) {
    reply.refuse("the handler threw something that is no exception");
  }
  if (reply.error_.empty() && reply.data_.size() != request.bytes) {
    reply.refuse(fmt::format("{} bytes were asked for, the handler gave {}", request.bytes,
                             reply.data_.size()));
  }
  return reply;
}

void PullService::answer(const Job& job) {
  const PullRequest& request = job.request;
  PAGODA_TRACE("comm", "serve", {"key", request.key}, {"bytes", request.bytes});
  bool waited = false;
  const PullReply reply = ask_handler(request, [&] {
    std::unique_lock lock(mutex_);
    if (std::exchange(waited, true)) return;
    ++waiting_;
    grow(lock);
    wake_.notify_one();
  });
  if (waited) {
    const std::lock_guard lock(mutex_);
    --waiting_;
  }

  const std::string& error = reply.error_;
  WireHead head;
  head.version_gone = reply.version_gone_ ? 1 : 0;
  head.refusal_bytes = error.copy(head.refusal.data(), kMaxRefusal);
  const std::byte nothing{};
  const auto head_bytes = offsetof(WireHead, refusal) + head.refusal_bytes;
  const int to = request.source;
  const Transfer transfers[] = {
      send_to(to, job.tag, wire(head).first(head_bytes)),
      send_to(to, job.tag + 1, error.empty() ? reply.data_ : std::span(&nothing, 1))};
  try {
    group_->exchange(std::span(transfers).first(request.bytes > 0 ? 2 : 1));
    served_.add(error.empty() ? request.bytes : 0, 0);
    if (!error.empty()) refused_.fetch_add(1, std::memory_order_relaxed);
  } catch (const GroupAborted&) {  // the asker's rank learns it by its own means
  } catch (const std::exception& failure) {
    log::warn("comm", "an answer was not delivered", {{"rank", to}, {"error", failure.what()}});
  }
}

void PullService::pull_here(const Pull& pull) {
  const PullRequest request{pull.rank, pull.key, pull.version, pull.begin, pull.out.size()};
  const PullReply reply = ask_handler(request, [] {});
  if (reply.version_gone_) throw VersionGone(pull.rank, reply.error_);
  if (!reply.error_.empty()) throw RemoteError(pull.rank, reply.error_);
  if (!pull.out.empty()) std::memcpy(pull.out.data(), reply.data_.data(), pull.out.size());
}

void PullService::pull(int rank, std::uint64_t key, std::uint64_t version, std::uint64_t begin,
                       std::span<std::byte> out) {
  const Pull one{rank, key, version, begin, out};
  pull({&one, 1});
}

void PullService::pull(std::span<const Pull> pulls) {
  PAGODA_TRACE("comm", "pull", {"pulls", pulls.size()});
  struct Asked {
    WireAsk ask{};
    WireHead head{};
    std::exception_ptr error;
  };
  std::vector<Asked> asked(pulls.size());
  std::vector<Transfer> transfers;
  transfers.reserve(3 * pulls.size());
  for (std::size_t i = 0; i < pulls.size(); ++i) {
    const Pull& pull = pulls[i];
    PAGODA_REQUIRE(pull.rank >= 0 && pull.rank < size(), "rank {} of {}", pull.rank, size());
    if (pull.rank == rank()) continue;
    const Tag tag = kFirstAnswerTag + 2 * (next_tag_.fetch_add(1) % kAnswerTags);
    asked[i].ask = {pull.key, pull.version, pull.begin, pull.out.size(), tag};
    transfers.push_back(receive_from(pull.rank, tag, wire_into(asked[i].head)));
    if (!pull.out.empty()) transfers.push_back(receive_from(pull.rank, tag + 1, pull.out));
    transfers.push_back(send_to(pull.rank, kAskTag, wire(asked[i].ask)));
  }
  if (!transfers.empty()) {
    const WaitMeter::Waiting waiting(pulls_);
    group_->exchange(transfers);
  }

  for (std::size_t i = 0; i < pulls.size(); ++i) {
    const Pull& pull = pulls[i];
    if (pull.rank == rank()) {
      try {
        pull_here(pull);
      } catch (...) {
        asked[i].error = std::current_exception();
      }
    } else if (asked[i].head.refusal_bytes > 0) {
      const WireHead& head = asked[i].head;
      const std::string text(head.refusal.data(),
                             std::min<std::uint64_t>(head.refusal_bytes, kMaxRefusal));
      asked[i].error = head.version_gone != 0
                           ? std::make_exception_ptr(VersionGone(pull.rank, text))
                           : std::make_exception_ptr(RemoteError(pull.rank, text));
      pulled_.add(0, 0);
    } else {
      pulled_.add(0, pull.out.size());
    }
  }
  for (const Asked& one : asked) {
    if (one.error) std::rethrow_exception(one.error);
  }
}

PullService::Stats PullService::stats() const noexcept {
  const Traffic pulled = pulled_.read();
  const Traffic served = served_.read();
  return {pulled.calls, pulled.received, served.calls, served.sent,
          refused_.load(std::memory_order_relaxed)};
}

}  // namespace pagoda::comm
