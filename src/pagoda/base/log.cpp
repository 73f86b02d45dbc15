// SPDX-License-Identifier: Apache-2.0
#include "pagoda/base/log.h"

#include <array>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>

#include <spdlog/logger.h>
#include <spdlog/sinks/stdout_sinks.h>

#include "pagoda/base/error.h"
#include "pagoda/base/json_text.h"
#include "pagoda/base/ranked_mutex.h"

namespace pagoda::log {
namespace {

constexpr std::array<std::string_view, 6> kLevelNames = {"trace", "debug", "info",
                                                         "warn",  "error", "off"};

spdlog::level::level_enum to_spdlog(Level level) {
  // spdlog has "critical" between error and off.
  return level == Level::Off ? spdlog::level::off : static_cast<spdlog::level::level_enum>(level);
}

std::string_view name_of(Level level) {
  return kLevelNames[static_cast<std::size_t>(level)];
}

/// The process's logger. Never destroyed: threads may log while the process ends.
struct Logger {
  std::shared_ptr<spdlog::logger> sink;
  std::atomic<Level> threshold{Level::Warn};
  bool json = false;
  RankedMutex<LockRank::LogCapture> capture_mutex;
  Capture::Sink capture;  // guarded by capture_mutex
  std::atomic<bool> captured{false};

  Logger() {
    const char* format = std::getenv("PAGODA_LOG_FORMAT");
    json = format != nullptr && std::string_view(format) == "json";
    sink = std::make_shared<spdlog::logger>("pagoda",
                                            std::make_shared<spdlog::sinks::stderr_sink_mt>());
    sink->set_level(spdlog::level::trace);
    sink->set_pattern(json ? "%v" : "%H:%M:%S.%e %v");
    sink->flush_on(spdlog::level::trace);
    if (const char* name = std::getenv("PAGODA_LOG"); name != nullptr && *name != '\0') {
      try {
        threshold = parse_level(name);
      } catch (const UserError& e) {
        sink->warn("warn  log: PAGODA_LOG is ignored: {}", e.message());
      }
    }
  }
};

Logger& logger() {
  static Logger* instance = new Logger;
  return *instance;
}

std::string as_text(Level level, std::string_view component, std::string_view message,
                    Fields fields) {
  std::string line = fmt::format("{:<5} {}: {}", name_of(level), component, message);
  for (const Field& field : fields) {
    const bool spaced =
        field.value.empty() || field.value.find_first_of(" \"=") != std::string::npos;
    line += fmt::format(" {}={}", field.key, spaced ? json_text(field.value) : field.value);
  }
  return line;
}

std::string as_json(Level level, std::string_view component, std::string_view message,
                    Fields fields) {
  const auto since_epoch = std::chrono::system_clock::now().time_since_epoch();
  std::string line = fmt::format(R"({{"time":{:.6f},"level":"{}","component":{},"message":{})",
                                 std::chrono::duration<double>(since_epoch).count(), name_of(level),
                                 json_text(component), json_text(message));
  for (const Field& field : fields) {
    line += fmt::format(",{}:{}", json_text(field.key),
                        field.quoted ? json_text(field.value) : field.value);
  }
  return line + "}";
}

}  // namespace

bool enabled(Level level) noexcept {
  Logger& log = logger();
  return level >= log.threshold.load(std::memory_order_relaxed) ||
         log.captured.load(std::memory_order_relaxed);
}

void set_level(Level level) noexcept {
  logger().threshold = level;
}

Level level() noexcept {
  return logger().threshold;
}

Level parse_level(std::string_view name) {
  for (std::size_t i = 0; i < kLevelNames.size(); ++i) {
    if (kLevelNames[i] == name) return static_cast<Level>(i);
  }
  throw UserError(
      fmt::format("'{}' is not a log level (one of {})", name, fmt::join(kLevelNames, ", ")));
}

void write(Level level, std::string_view component, std::string_view message, Fields fields) {
  if (!enabled(level)) return;
  Logger& log = logger();
  if (log.captured) {
    const std::lock_guard lock(log.capture_mutex);
    if (log.capture) {
      log.capture(level, as_text(level, component, message, fields));
      return;
    }
  }
  if (level < log.threshold.load()) return;
  log.sink->log(to_spdlog(level), "{}",
                log.json ? as_json(level, component, message, fields)
                         : as_text(level, component, message, fields));
}

Capture::Capture(Sink sink) {
  Logger& log = logger();
  const std::lock_guard lock(log.capture_mutex);
  PAGODA_CHECK(!log.capture, "log lines are captured already");
  log.capture = std::move(sink);
  log.captured = true;
}

Capture::~Capture() {
  Logger& log = logger();
  const std::lock_guard lock(log.capture_mutex);
  log.capture = nullptr;
  log.captured = false;
}

}  // namespace pagoda::log
