# The public libraries: libimpress (all modules) and libimpress_llama (the adapter), static and shared, and how they are
# installed. Only the functions that a public header declares are exported by the shared ones.

# Writes a linker version script with the functions that `header` declares at the start of a line.
function(impress_export_script out header)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${header})
  file(STRINGS ${header} lines REGEX "^[a-z].*[ *]imp_[a-z0-9_]+\\(")
  set(script "{\n  global:\n")
  foreach(line ${lines})
    if(line MATCHES "[ *](imp_[a-z0-9_]+)\\(")
      string(APPEND script "    ${CMAKE_MATCH_1};\n")
    endif()
  endforeach()
  string(APPEND script "  local: *;\n};\n")
  file(CONFIGURE OUTPUT ${out} CONTENT "${script}" @ONLY)
endfunction()

# impress_public_library(name HEADER h OBJECTS target... LIBS lib... NEEDS library...): <name>_static and <name>_shared
# from the objects of the targets. NEEDS names other public libraries, without suffix. <name> stands for the static one
# inside the build; installed they are impress::<name> (shared) and impress::<name>_static.
function(impress_public_library name)
  cmake_parse_arguments(L "" "HEADER" "OBJECTS;LIBS;NEEDS" ${ARGN})
  set(objects)
  foreach(target ${L_OBJECTS})
    list(APPEND objects $<TARGET_OBJECTS:${target}>)
  endforeach()
  set(script ${CMAKE_CURRENT_BINARY_DIR}/${name}.map)
  impress_export_script(${script} ${L_HEADER})

  foreach(kind static shared)
    string(TOUPPER ${kind} upper)
    set(target ${name}_${kind})
    add_library(${target} ${upper} ${objects})
    set_target_properties(${target} PROPERTIES
      OUTPUT_NAME ${name} LINKER_LANGUAGE C
      ARCHIVE_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/lib)
    target_include_directories(${target} PUBLIC
      $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
    if(IMPRESS_SANITIZE)
      target_link_options(${target} PUBLIC -fsanitize=${IMPRESS_SANITIZE})
    endif()
    foreach(other ${L_NEEDS})
      target_link_libraries(${target} PUBLIC ${other}_${kind})
    endforeach()
    target_link_libraries(${target} PRIVATE ${L_LIBS})
  endforeach()

  set_target_properties(${name}_static PROPERTIES EXPORT_NAME ${name}_static)
  set_target_properties(${name}_shared PROPERTIES
    EXPORT_NAME ${name} VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR}
    LINK_DEPENDS ${script})
  target_link_options(${name}_shared PRIVATE -Wl,--version-script=${script})
  if(NOT IMPRESS_SANITIZE)
    target_link_options(${name}_shared PRIVATE -Wl,-z,defs)
  endif()
  add_library(${name} ALIAS ${name}_static)

  install(TARGETS ${name}_shared EXPORT ${name}-shared ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(TARGETS ${name}_static EXPORT ${name}-static ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(FILES ${L_HEADER} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/impress)
  foreach(kind static shared)
    install(EXPORT ${name}-${kind} NAMESPACE impress:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/impress)
  endforeach()
endfunction()

# libimpress: the objects of all modules.
function(impress_library)
  get_property(modules GLOBAL PROPERTY IMPRESS_MODULES)
  if(NOT modules)
    return()
  endif()
  set(libs Threads::Threads m)
  set(IMPRESS_REQUIRES_PRIVATE)
  foreach(pair "xxhash libxxhash" "sqlite sqlite3" "uring liburing" "crypto libcrypto")
    string(REPLACE " " ";" pair ${pair})
    list(GET pair 0 short)
    list(GET pair 1 pc)
    if(impress_${short}_FOUND)
      list(APPEND libs PkgConfig::impress_${short})
      list(APPEND IMPRESS_REQUIRES_PRIVATE ${pc})
    endif()
  endforeach()
  impress_public_library(impress
    HEADER ${PROJECT_SOURCE_DIR}/include/impress/impress.h OBJECTS ${modules} LIBS ${libs})
  list(JOIN IMPRESS_REQUIRES_PRIVATE ", " IMPRESS_REQUIRES_PRIVATE)
  impress_pkgconfig(impress)
endfunction()

# Installs lib/pkgconfig/<name>.pc from cmake/<name>.pc.in. The prefix is relative to the file, so that the tree can move.
function(impress_pkgconfig name)
  set(dir ${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_LIBDIR}/pkgconfig)
  file(RELATIVE_PATH IMPRESS_PC_TO_PREFIX ${dir} ${CMAKE_INSTALL_PREFIX})
  string(REGEX REPLACE "/$" "" IMPRESS_PC_TO_PREFIX "${IMPRESS_PC_TO_PREFIX}")
  configure_file(${PROJECT_SOURCE_DIR}/cmake/${name}.pc.in ${CMAKE_CURRENT_BINARY_DIR}/${name}.pc @ONLY)
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/${name}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endfunction()

# The exported CMake package: find_package(impress), targets impress::impress and impress::impress_llama;
# and what goes with the program.
function(impress_install)
  if(NOT TARGET impress_static)
    return()
  endif()
  include(CMakePackageConfigHelpers)
  set(IMPRESS_CONFIG_URING)
  if(impress_uring_FOUND)
    set(IMPRESS_CONFIG_URING "\"uring liburing\"")
  endif()
  set(IMPRESS_CONFIG_CRYPTO)
  if(impress_crypto_FOUND)
    set(IMPRESS_CONFIG_CRYPTO "\"crypto libcrypto\"")
  endif()
  set(IMPRESS_CONFIG_LLAMA_HINT "${LLAMA_LIB_DIR}/cmake/llama")
  configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/impress-config.cmake.in
    ${PROJECT_BINARY_DIR}/impress-config.cmake INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/impress)
  write_basic_package_version_file(${PROJECT_BINARY_DIR}/impress-config-version.cmake COMPATIBILITY SameMinorVersion)
  install(FILES ${PROJECT_BINARY_DIR}/impress-config.cmake ${PROJECT_BINARY_DIR}/impress-config-version.cmake
    DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/impress)
  if(TARGET impress_cli)
    install(FILES ${PROJECT_SOURCE_DIR}/completions/impress.bash
      DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME impress)
    install(FILES ${PROJECT_SOURCE_DIR}/completions/_impress DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions)
    file(GLOB pages CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/man/*.1)
    install(FILES ${pages} DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
  endif()
endfunction()
