# SPDX-License-Identifier: Apache-2.0
# pagoda_test(NAME LABELS unit|property|cuda|slow … SOURCES … LIBRARIES …)
#
# A GoogleTest binary `build/bin/tests/NAME`. Each of its tests is a CTest test of its own, found by
# asking the binary when CTest starts. LABELS are those of the whole binary: what is slow or needs a
# GPU lives in a binary of its own.
find_package(GTest REQUIRED)
include(GoogleTest)

function(pagoda_test NAME)
  cmake_parse_arguments(TEST "" "TIMEOUT" "LABELS;SOURCES;LIBRARIES" ${ARGN})
  if(NOT TEST_TIMEOUT)
    set(TEST_TIMEOUT 120)
  endif()
  add_executable(${NAME} ${TEST_SOURCES})
  target_link_libraries(${NAME} PRIVATE pagoda_flags ${TEST_LIBRARIES} GTest::gmock GTest::gtest_main)
  target_include_directories(${NAME} PRIVATE ${CMAKE_SOURCE_DIR}/tests)
  target_compile_options(${NAME} PRIVATE -O1 -g1)  # tests are compiled more often than run
  set_target_properties(${NAME} PROPERTIES
    RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin/tests)
  gtest_discover_tests(${NAME} TEST_PREFIX ${NAME}/ DISCOVERY_MODE PRE_TEST
    PROPERTIES LABELS "${TEST_LABELS}" TIMEOUT ${TEST_TIMEOUT})
endfunction()
