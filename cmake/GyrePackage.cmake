# find_package(gyre) for programs outside this tree (docs/library.md): from the build folder (-Dgyre_DIR=...), or from
# what `cmake --install` has installed. gyre_export() selects the targets.
include(CMakePackageConfigHelpers)
configure_file(${CMAKE_SOURCE_DIR}/cmake/gyreConfig.cmake.in ${CMAKE_BINARY_DIR}/gyreConfig.cmake @ONLY)
write_basic_package_version_file(${CMAKE_BINARY_DIR}/gyreConfigVersion.cmake COMPATIBILITY SameMinorVersion)
export(EXPORT gyre NAMESPACE gyre:: FILE ${CMAKE_BINARY_DIR}/gyreTargets.cmake)

set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/gyre)
install(FILES ${CMAKE_BINARY_DIR}/gyreConfig.cmake ${CMAKE_BINARY_DIR}/gyreConfigVersion.cmake
        DESTINATION ${package_folder})
install(EXPORT gyre NAMESPACE gyre:: FILE gyreTargets.cmake DESTINATION ${package_folder})
install(DIRECTORY ${CMAKE_SOURCE_DIR}/src/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/gyre
        FILES_MATCHING PATTERN "*.hpp" PATTERN "*.cuh" PATTERN precompiled.hpp EXCLUDE PATTERN shim EXCLUDE)
install(FILES ${CMAKE_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
