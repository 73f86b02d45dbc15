# SPDX-License-Identifier: Apache-2.0
# pagoda_test(NAME [WHOLE | SHARDS N] LABELS unit|property|cuda|slow … SOURCES … LIBRARIES …)
#
# A GoogleTest binary `build/bin/tests/NAME`. Each of its tests is a CTest test of its own, found by
# asking the binary when CTest starts. LABELS are those of the whole binary: what is slow or needs a
# GPU lives in a binary of its own. WHOLE makes the binary one CTest test: one that loads torch takes
# most of a second to start. SHARDS N makes it N of them, for one that would be the last to end.
find_package(GTest REQUIRED)
include(GoogleTest)

function(pagoda_test NAME)
  cmake_parse_arguments(TEST "WHOLE" "TIMEOUT;SHARDS" "LABELS;SOURCES;LIBRARIES" ${ARGN})
  if(NOT TEST_TIMEOUT)
    set(TEST_TIMEOUT 120)
  endif()
  add_executable(${NAME} ${TEST_SOURCES})
  target_link_libraries(${NAME} PRIVATE pagoda_flags ${TEST_LIBRARIES} GTest::gmock GTest::gtest_main)
  target_include_directories(${NAME} PRIVATE ${CMAKE_SOURCE_DIR}/tests)
  # Tests are compiled more often than run, and most of that is GoogleTest's headers: one
  # translation unit a binary. Names in anonymous namespaces differ between files of a binary.
  target_compile_options(${NAME} PRIVATE -O1 -g1)
  # Under sanitizers optimising takes half of that time. Properties go through many values: those stay.
  if(PAGODA_SANITIZE AND NOT property IN_LIST TEST_LABELS)
    target_compile_options(${NAME} PRIVATE -O0)
  endif()
  # GoogleTest's templates take three times as long to compile with checks of undefined behaviour,
  # and are not what is tested: the layers themselves are checked.
  if(PAGODA_SANITIZE MATCHES undefined)
    target_compile_options(${NAME} PRIVATE -fno-sanitize=undefined)
  endif()
  set_target_properties(${NAME} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
  set_target_properties(${NAME} PROPERTIES
    RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin/tests)
  if(TEST_SHARDS)
    math(EXPR last "${TEST_SHARDS} - 1")
    foreach(shard RANGE ${last})
      add_test(NAME ${NAME}/shard_${shard} COMMAND ${NAME})
      set_tests_properties(${NAME}/shard_${shard} PROPERTIES LABELS "${TEST_LABELS}"
        TIMEOUT ${TEST_TIMEOUT} COST 100
        ENVIRONMENT "GTEST_TOTAL_SHARDS=${TEST_SHARDS};GTEST_SHARD_INDEX=${shard}")
    endforeach()
    return()
  endif()
  if(TEST_WHOLE)
    add_test(NAME ${NAME} COMMAND ${NAME})
    set_tests_properties(${NAME} PROPERTIES LABELS "${TEST_LABELS}" TIMEOUT ${TEST_TIMEOUT})
    return()
  endif()
  gtest_discover_tests(${NAME} TEST_PREFIX ${NAME}/ DISCOVERY_MODE PRE_TEST
    PROPERTIES LABELS "${TEST_LABELS}" TIMEOUT ${TEST_TIMEOUT})
endfunction()
