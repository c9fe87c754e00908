"""Spack recipe of Gyre; docs/building.md says how to use it."""

from pathlib import Path

from spack_repo.builtin.build_systems.cmake import CMakePackage, generator
from spack_repo.builtin.build_systems.cuda import CudaPackage

from spack.package import *


class Gyre(CMakePackage, CudaPackage):
    """MPI mini-apps for the data path of long-context LLM training and scoring: packing,
    context-parallel sharding and attention, vocab-parallel log-probabilities."""

    git = str(Path(__file__).resolve().parents[6])  # the checkout that holds this recipe

    generator("ninja")
    license("BSD-3-Clause")
    version("main", branch="main")

    variant(
        "nccl",
        default=True,
        when="+cuda",
        description="Communicate between GPUs by NCCL; always needed by +cuda",
    )
    variant(
        "cudnn",
        default=False,
        when="+cuda",
        description="Fused attention; downloads cuDNN's C++ headers from PyPI",
    )
    variant("tests", default=False, description="Build the tests, and install what they need")
    conflicts("~nccl", when="+cuda", msg="the CUDA build of Gyre needs NCCL")
    conflicts("%gcc@:11", msg="Gyre was built with GCC from 12 on")
    requires("target=x86_64:", msg="libxsmm 1.17 has no code for other processors")

    depends_on("c", type="build")
    depends_on("cxx", type="build")
    depends_on("cmake@3.22:", type="build")
    depends_on("ninja", type="build")
    depends_on("git", type="build")
    depends_on("pkgconfig", type="build")
    depends_on("mpi@3.1:")
    depends_on("hdf5@1.10: +mpi")
    depends_on("hwloc@2.9:")
    depends_on("highway@1.0.3:")
    depends_on("libxsmm@1.17")
    depends_on("xxhash@0.8:")
    depends_on("cli11@2.1:")
    depends_on("tomlplusplus@3.3:")
    depends_on("fmt@9.1:")
    depends_on("nlohmann-json@3.11:")
    depends_on("openssl@3:")
    depends_on("python@3.11:", type="run")  # gyre-study
    depends_on("cuda@13:", when="+cuda")
    depends_on("nccl@2.28:", when="+nccl")
    for arch in CudaPackage.cuda_arch_values:
        depends_on(f"nccl cuda_arch={arch}", when=f"+nccl cuda_arch={arch}")
    with when("+cudnn"):
        depends_on("cudnn@9.19:")
        depends_on("py-pip", type="build")
    with when("+tests"):
        depends_on("googletest@1.12:")
        depends_on("rapidcheck")

    def cmake_args(self):
        arguments = [
            self.define_from_variant("BUILD_TESTING", "tests"),
            self.define_from_variant("GYRE_CUDA", "cuda"),
            self.define("GYRE_BENCHMARKS", False),
            self.define("GYRE_CUDNN_FRONTEND", "AUTO" if self.spec.satisfies("+cudnn") else "OFF"),
        ]
        if self.spec.satisfies("+cuda") and "none" not in self.spec.variants["cuda_arch"].value:
            arguments.append(
                self.define("CMAKE_CUDA_ARCHITECTURES", self.spec.variants["cuda_arch"].value)
            )
        return arguments
