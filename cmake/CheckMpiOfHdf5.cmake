# gyre_check_mpi_of_hdf5(HDF5_LIBRARIES MPI_LIBRARIES) fails if a shared HDF5 library needs an MPI library that is not one of
# MPI_LIBRARIES. A program with two MPIs fails in its first call of HDF5. Static libraries cannot be checked.
function(gyre_check_mpi_of_hdf5 hdf5_libraries mpi_libraries)
  find_program(GYRE_OBJDUMP objdump)
  mark_as_advanced(GYRE_OBJDUMP)
  if(NOT GYRE_OBJDUMP)
    return()
  endif()
  set(found "")
  foreach(library ${mpi_libraries})
    execute_process(COMMAND ${GYRE_OBJDUMP} -p ${library} OUTPUT_VARIABLE headers ERROR_QUIET)
    if(headers MATCHES "SONAME +(libmpi[^ \n]*)")
      list(APPEND found ${CMAKE_MATCH_1})
    endif()
  endforeach()
  foreach(library ${hdf5_libraries})
    if(TARGET ${library}) # of HDF5's own CMake package
      get_target_property(library ${library} LOCATION)
    endif()
    execute_process(COMMAND ${GYRE_OBJDUMP} -p ${library} OUTPUT_VARIABLE headers ERROR_QUIET)
    if(found AND headers MATCHES "NEEDED +(libmpi[^ \n]*)" AND NOT CMAKE_MATCH_1 IN_LIST found)
      message(
        FATAL_ERROR
          "Two MPIs: HDF5 (${library}) was built with ${CMAKE_MATCH_1}, and MPI is ${found} (${mpi_libraries}). Pass "
          "-DHDF5_C_COMPILER_EXECUTABLE=H5PCC of that MPI (Debian: libhdf5-mpich-dev has /usr/bin/h5pcc.mpich), or "
          "-DMPI_C_COMPILER and -DMPI_CXX_COMPILER of HDF5's MPI")
    endif()
  endforeach()
endfunction()
