// SPDX-License-Identifier: Apache-2.0
// docs/config.md says what the code does. PAGODA_UPDATE_DOCS=1 makes it so.
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

#include <gtest/gtest.h>

#include "pagoda/engine/config.h"

namespace pagoda {
namespace {

TEST(ConfigDocs, TheTableIsUpToDate) {
  const std::string path = PAGODA_SOURCE_DIR "/docs/config.md";
  std::ostringstream read;
  read << std::ifstream(path).rdbuf();
  const std::string text = read.str();
  std::string right = text;
  for (const bool expert : {false, true}) {
    const std::string keys = expert ? "expert keys" : "keys";
    const std::string begin = "<!-- " + keys + ": begin -->\n";
    const std::size_t from = right.find(begin);
    const std::size_t to = right.find("<!-- " + keys + ": end -->\n");
    ASSERT_NE(from, std::string::npos) << path;
    ASSERT_NE(to, std::string::npos) << path;
    right = right.substr(0, from + begin.size()) + config_table(expert) + right.substr(to);
  }
  if (std::getenv("PAGODA_UPDATE_DOCS") != nullptr) {
    std::ofstream(path) << right;
    GTEST_SKIP() << "docs/config.md was written";
  }
  EXPECT_EQ(text, right) << "run this test with PAGODA_UPDATE_DOCS=1 to write docs/config.md";
}

}  // namespace
}  // namespace pagoda
