// SPDX-License-Identifier: Apache-2.0
#include "bench_report.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace pagoda::cli {
namespace {

BenchReport example() {
  BenchReport report("Title");
  report.add({"read", 1.9, "GB/s", 2.0, "fio"});
  report.add({"a \"long\" → name", 1234.5, "ns", 0, ""});
  report.note("A note.");
  return report;
}

TEST(BenchReport, TableAlignsAndShowsTheLimitBesideTheFigure) {
  EXPECT_EQ(example().table(),
            "Title\n"
            "                   measured  unit  limit   ratio  limit is\n"
            "  read                 1.90  GB/s   2.00  95.0 %  fio\n"
            "  a \"long\" → name      1234  ns        –       –\n"
            "  A note.\n");
}

TEST(BenchReport, JsonHoldsTheSameRows) {
  const auto report = nlohmann::json::parse(example().json());
  ASSERT_EQ(report["rows"].size(), 2U);
  const auto& row = report["rows"][0];
  EXPECT_EQ(row["name"], "read");
  EXPECT_EQ(row["value"], 1.9);
  EXPECT_EQ(row["unit"], "GB/s");
  EXPECT_EQ(row["limit"], 2.0);
  EXPECT_EQ(row["limit_name"], "fio");
  EXPECT_DOUBLE_EQ(row["ratio"], 0.95);
  EXPECT_TRUE(report["rows"][1]["limit"].is_null());
  EXPECT_TRUE(report["rows"][1]["ratio"].is_null());
  EXPECT_EQ(report["rows"][1]["name"], "a \"long\" → name");
}

TEST(BenchReport, EmptyIsStillAnObject) {
  EXPECT_EQ(BenchReport("x").json(), R"({"rows":[]})");
}

}  // namespace
}  // namespace pagoda::cli
