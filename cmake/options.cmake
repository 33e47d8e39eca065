# Choices of a build, and the flags that every target shares.
option(TOKENYARD_TESTS "Build the tests" ${PROJECT_IS_TOP_LEVEL})
option(TOKENYARD_PROGRAM "Build the tokenyard program" ${PROJECT_IS_TOP_LEVEL})
set(TOKENYARD_SANITIZE "" CACHE STRING "Sanitizers to build with: address,undefined or thread")

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

add_library(tokenyard_flags INTERFACE)
# No contraction: a fused multiply-add rounds once where the contract says twice (docs/protocol.md, "Sums").
target_compile_options(tokenyard_flags INTERFACE -ffp-contract=off -Wall -Wextra -Wpedantic -Wshadow -Wconversion
                                                 -Wno-sign-conversion)
if(TOKENYARD_SANITIZE)
  target_compile_options(tokenyard_flags INTERFACE -fsanitize=${TOKENYARD_SANITIZE} -fno-omit-frame-pointer
                                                   -fno-sanitize-recover=all)
  target_link_options(tokenyard_flags INTERFACE -fsanitize=${TOKENYARD_SANITIZE})
endif()
