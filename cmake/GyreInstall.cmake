# What `cmake --install` adds to programs and libraries (docs/building.md): data, studies, the Python package, pages,
# man pages, completion; the target uninstall; packages by CPack.
#
# Programs look for data in FOLDER/../share/gyre, FOLDER being theirs (src/io/brought_file.hpp). In the build folder that
# is a link to the inputs of the source tree.
file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/share/gyre)
file(CREATE_LINK ${CMAKE_SOURCE_DIR}/inputs ${CMAKE_BINARY_DIR}/share/gyre/inputs SYMBOLIC)

cmake_path(SET share NORMALIZE "${CMAKE_INSTALL_BINDIR}/../share/gyre")
install(DIRECTORY inputs slurm python DESTINATION ${share} USE_SOURCE_PERMISSIONS
        PATTERN __pycache__ EXCLUDE PATTERN .gitignore EXCLUDE PATTERN *.egg-info EXCLUDE)
install(FILES results/gyre-result-1.schema.json results/gyre-plan-1.schema.json DESTINATION ${share}/results)
file(CREATE_LINK ../share/gyre/slurm/gyre-study ${CMAKE_BINARY_DIR}/gyre-study SYMBOLIC)
install(FILES ${CMAKE_BINARY_DIR}/gyre-study DESTINATION ${CMAKE_INSTALL_BINDIR})

install(FILES README.md CHANGELOG.md CITATION.cff DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY docs DESTINATION ${CMAKE_INSTALL_DOCDIR})

# Man pages and completion are made of --help, so that options are listed in one place, the programs.
get_property(apps GLOBAL PROPERTY GYRE_APPS)
set(man ${CMAKE_INSTALL_MANDIR}/man1)
foreach(app ${apps} study)
  install(FILES cmake/completion.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions
          RENAME gyre-${app})
  set(program ${CMAKE_SOURCE_DIR}/slurm/gyre-study)
  if(TARGET gyre-${app})
    set(program $<TARGET_FILE:gyre-${app}>)
  endif()
  install(CODE "execute_process(COMMAND ${CMAKE_COMMAND} -E env UCX_LOG_LEVEL=fatal ${program} --help
                  COMMAND awk -v name=gyre-${app} -v version=${PROJECT_VERSION} -f ${CMAKE_SOURCE_DIR}/cmake/man_page.awk
                  OUTPUT_FILE ${CMAKE_BINARY_DIR}/gyre-${app}.1 ERROR_VARIABLE error RESULTS_VARIABLE results)
                if(results STREQUAL \"0;0\")
                  file(INSTALL ${CMAKE_BINARY_DIR}/gyre-${app}.1 DESTINATION \"\${CMAKE_INSTALL_PREFIX}/${man}\")
                else()
                  message(STATUS \"No man page, as gyre-${app} --help does not run here: \${error}\")
                endif()")
endforeach()

# What the target uninstall removes. install_manifest.txt tells of CPack's installations, too, which go to a folder of its own.
install(CODE "if(NOT \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}\" MATCHES \"/_CPack_Packages/\")
                list(JOIN CMAKE_INSTALL_MANIFEST_FILES \"\\n\" installed)
                file(WRITE ${CMAKE_BINARY_DIR}/installed_files.txt \"\${installed}\\n\")
              endif()")
add_custom_target(uninstall COMMAND ${CMAKE_COMMAND} -D MANIFEST=${CMAKE_BINARY_DIR}/installed_files.txt
                                    -P ${CMAKE_SOURCE_DIR}/cmake/uninstall.cmake VERBATIM)

set(CPACK_GENERATOR DEB TZST)
set(CPACK_PACKAGE_CONTACT "The Gyre Authors")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_COMPRESSION_TYPE zstd)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS "mpich, python3 (>= 3.11), python3-pandas, python3-matplotlib")
include(CPack)
