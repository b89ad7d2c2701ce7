#!/usr/bin/env bash
# Executes the AMX path (isa/amx.cpp, unmodified) in Bochs, as a Sapphire Rapids without an operating system: random products,
# convolutions, and products of MiniLM's first layer. Compares the results bit for bit with the model of the tiles that amx_test uses.
#
#   kernels/tests/emulated/amx.sh [CASES [SEED]]
#
# CXX: GCC; the default is g++. PYTHON: an interpreter that has the project; MiniLM is left out if it lacks the model's package.
# Bochs's packages are those of Debian 13, from the mirror that apt uses here, unpacked into build/emulated/amx (0.5 GB) and run
# with their own C library; nothing is installed. Exits with 0 and the reason if something cannot be had, unless REQUIRED=1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

run=("${1:-200}" "${2:-1}") here=kernels/tests/emulated name=amx work=$PWD/build/emulated/amx
. "$here/debian.sh"

grep -q avx512_bf16 /proc/cpuinfo || cannot "the model's few rows need a processor with AVX512_BF16"
for tool in apt-get dpkg objcopy; do command -v "$tool" >/dev/null || cannot "there is no $tool"; done
need_debian
[[ -e $work/root/.complete ]] || unpack trixie amd64 "$work/root" bochs bochs-term

read -ra compiler <<<"${CXX:-g++}"
flags=(-Ikernels -Ikernels/tests "-I$here" -std=c++17 -O2 -ffp-contract=off -Wno-psabi -Wno-maybe-uninitialized -Wno-uninitialized)
bare=(-fno-pic -mno-red-zone -fcf-protection=none -fno-stack-protector -U_FORTIFY_SOURCE -fno-exceptions -fno-rtti
  -fno-threadsafe-statics -fno-math-errno -Dthread_local=)
objects=() jobs=()
for source in kernels/isa/{amx,amx_detect,avx512,avx512_bf16}.cpp kernels/gemm/agree.cpp "$here"/{payload.cpp,boot.S}; do
  objects+=("$work/$(basename "${source%.*}").o")
  "${compiler[@]}" "${flags[@]}" "${bare[@]}" -c "$source" -o "${objects[-1]}" &
  jobs+=($!)
done
"${compiler[@]}" "${flags[@]}" -pthread "$here/host.cpp" kernels/isa/*.cpp kernels/gemm/*.cpp -o "$work/host"
for job in "${jobs[@]}"; do wait "$job"; done
unset 'objects[-1]'
ld -Ttext=0xF0000 --oformat binary -e 0 "$work/boot.o" -o "$work/boot.bin"
libgcc=$("${compiler[@]}" -print-libgcc-file-name)
ld -static --no-warn-rwx-segments -T "$here/payload.ld" "${objects[@]}" "$libgcc" -o "$work/payload.elf"
objcopy -O binary --set-section-flags .bss=alloc,load,contents "$work/payload.elf" "$work/payload.bin"
# Bochs decodes STTILECFG only with VEX.W = 1; the processor's encoding has W = 0.
LC_ALL=C sed -i 's/\xc4\xe2\x79\x49/\xc4\xe2\xf9\x49/g' "$work/payload.bin"

more=()
if "${PYTHON:-python3}" "$here/minilm.py" "$work/minilm.bin"; then more=("$work/minilm.bin"); fi
"$work/host" draw "${run[@]}" "$work/cases.bin" "${more[@]}"
# The ROM of 4 MiB that ends at 4 GiB: the payload, the cases, the code that starts at reset.
for part in payload:393216 cases:3735552 boot:65536; do
  file=$work/${part%:*}.bin size=${part#*:}
  (($(stat -c %s "$file") <= size)) || { echo "$file has more than $size bytes" >&2; exit 1; }
  truncate -s "$size" "$file"
  cat "$file"
done >"$work/all.rom"
truncate -s 32768 "$work/vga.bin"
printf '%s\n' "display_library: term" "memory: guest=256, host=256" "cpu: model=sapphire_rapids, reset_on_triple_fault=0" \
  "romimage: file=all.rom, address=0xffc00000" "vgaromimage: file=vga.bin" "parport1: enabled=1, file=out.bin" \
  "log: bochs.log" "panic: action=fatal" >"$work/bochsrc"
rm -f "$work"/{bochs.log,out.bin}
cd "$work"
LTDL_LIBRARY_PATH=root/usr/lib/x86_64-linux-gnu/bochs/plugins BXSHARE=root/usr/share/bochs TERM=xterm timeout 600 \
  root/usr/lib64/ld-linux-x86-64.so.2 --library-path root/usr/lib/x86_64-linux-gnu:root/usr/lib/x86_64-linux-gnu/bochs/plugins \
  root/usr/bin/bochs-bin -q -f bochsrc </dev/null >bochs.out 2>&1 || true  # it also exits with 1 at the end of a good run
grep -q "Shutdown port" bochs.log || { tail -20 bochs.log bochs.out >&2; echo "Bochs did not reach the end" >&2; exit 1; }
./host check "${run[@]}" out.bin "${more[@]}"
