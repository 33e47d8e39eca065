# What `cmake --install` puts where: library, public headers, package files, program, and the program's layer.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(TOKENYARD_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/tokenyard)

install(TARGETS tokenyard EXPORT tokenyard_targets
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        FILE_SET public_headers DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT tokenyard_targets FILE tokenyard-targets.cmake NAMESPACE tokenyard:: DESTINATION ${TOKENYARD_PACKAGE_DIR})

get_target_property(TOKENYARD_TYPE tokenyard TYPE)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/tokenyard-config.cmake.in
                              ${PROJECT_BINARY_DIR}/tokenyard-config.cmake
                              INSTALL_DESTINATION ${TOKENYARD_PACKAGE_DIR})
# Before 1.0 a minor version may change the interface.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/tokenyard-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/tokenyard-config.cmake ${PROJECT_BINARY_DIR}/tokenyard-config-version.cmake
        DESTINATION ${TOKENYARD_PACKAGE_DIR})

if(TARGET tokenyard_program)
  install(TARGETS tokenyard_program RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/data/tiny_moe DESTINATION ${CMAKE_INSTALL_DATADIR}/tokenyard)
endif()
