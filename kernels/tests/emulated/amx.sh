#!/usr/bin/env bash
# Executes the AMX path (isa/amx.cpp, unmodified) in Bochs, as a Sapphire Rapids without an operating system: random products and
# those of MiniLM's first layer. Compares the results bit for bit with the model of the tiles that amx_test uses.
#
#   kernels/tests/emulated/amx.sh [CASES [SEED]]
#
# CXX: GCC; the default is g++. PYTHON: an interpreter that has the project; MiniLM is left out if it lacks the model's package.
# Bochs's packages are those of Debian 13, from the mirror that apt uses here, unpacked into build/emulated/amx (0.5 GB) and run
# with their own C library; nothing is installed. Exits with 0 and the reason if something cannot be had, unless REQUIRED=1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

run=("${1:-200}" "${2:-1}") here=kernels/tests/emulated out=$PWD/build/emulated/amx
cannot() { echo "emulated amx: skipped: $*"; exit "${REQUIRED:-0}"; }

get_bochs() {
  local keys=/usr/share/keyrings/debian-archive-keyring.gpg apt=$out/apt mirror options package
  rm -rf "$out/root" "$apt"
  mkdir -p "$out/root" "$apt"/{state/lists/partial,cache/archives/partial} && : >"$apt/status"
  mirror=$( (grep -rhoE "https?://[^ ]+/debian/?( |\$)" /etc/apt/ 2>/dev/null || true) | grep -v snapshot | head -1 | tr -d " ")
  [[ -n $mirror && -e $keys ]] || cannot "apt uses no mirror of Debian here, or there is no $keys"
  printf 'Types: deb\nURIs: %s\nSuites: trixie\nComponents: main\nSigned-By: %s\n' "$mirror" "$keys" >"$apt/debian.sources"
  options=(-qq -o "Dir::State=$apt/state" -o "Dir::State::status=$apt/status" -o "Dir::Cache=$apt/cache" -o Acquire::Retries=2
    -o "Dir::Etc::sourcelist=$apt/debian.sources" -o Dir::Etc::sourceparts=/dev/null -o APT::Install-Recommends=false
    -o APT::Sandbox::User=root)
  apt-get "${options[@]}" update >&2 || true  # it succeeds without a network as well
  apt-get "${options[@]}" install -y --download-only bochs bochs-term >"$apt/log" 2>&1 ||
    cannot "Debian 13's packages cannot be downloaded: $(tail -1 "$apt/log")"
  for package in "$apt"/cache/archives/*.deb; do
    dpkg --fsys-tarfile "$package" | tar -x -C "$out/root" --exclude='./usr/share/doc*' --exclude='./usr/share/locale*'
  done
  rm -rf "$apt" && touch "$out/root/.complete"
}

[[ $(uname -sm) == "Linux x86_64" ]] || cannot "the emulator's packages are for x86-64 Linux"
grep -q avx512_bf16 /proc/cpuinfo || cannot "the model's few rows need a processor with AVX512_BF16"
for tool in apt-get dpkg objcopy; do command -v "$tool" >/dev/null || cannot "there is no $tool"; done
[[ -e $out/root/.complete ]] || get_bochs

read -ra compiler <<<"${CXX:-g++}"
flags=(-Ikernels -Ikernels/tests "-I$here" -std=c++17 -O2 -ffp-contract=off -Wno-psabi -Wno-maybe-uninitialized -Wno-uninitialized)
bare=(-fno-pic -mno-red-zone -fcf-protection=none -fno-stack-protector -U_FORTIFY_SOURCE -fno-exceptions -fno-rtti
  -fno-threadsafe-statics -fno-math-errno -Dthread_local=)
objects=() jobs=()
for source in kernels/isa/{amx,amx_detect,avx512,avx512_bf16}.cpp kernels/gemm/agree.cpp "$here"/{payload.cpp,boot.S}; do
  objects+=("$out/$(basename "${source%.*}").o")
  "${compiler[@]}" "${flags[@]}" "${bare[@]}" -c "$source" -o "${objects[-1]}" &
  jobs+=($!)
done
"${compiler[@]}" "${flags[@]}" -pthread "$here/host.cpp" kernels/isa/*.cpp kernels/gemm/*.cpp -o "$out/host"
for job in "${jobs[@]}"; do wait "$job"; done
unset 'objects[-1]'
ld -Ttext=0xF0000 --oformat binary -e 0 "$out/boot.o" -o "$out/boot.bin"
libgcc=$("${compiler[@]}" -print-libgcc-file-name)
ld -static --no-warn-rwx-segments -T "$here/payload.ld" "${objects[@]}" "$libgcc" -o "$out/payload.elf"
objcopy -O binary --set-section-flags .bss=alloc,load,contents "$out/payload.elf" "$out/payload.bin"
# Bochs decodes STTILECFG only with VEX.W = 1; the processor's encoding has W = 0.
LC_ALL=C sed -i 's/\xc4\xe2\x79\x49/\xc4\xe2\xf9\x49/g' "$out/payload.bin"

more=()
if "${PYTHON:-python3}" "$here/minilm.py" "$out/minilm.bin"; then more=("$out/minilm.bin"); fi
"$out/host" draw "${run[@]}" "$out/cases.bin" "${more[@]}"
# The ROM of 4 MiB that ends at 4 GiB: the payload, the cases, the code that starts at reset.
for part in payload:262144 cases:3866624 boot:65536; do
  file=$out/${part%:*}.bin size=${part#*:}
  (($(stat -c %s "$file") <= size)) || { echo "$file has more than $size bytes" >&2; exit 1; }
  truncate -s "$size" "$file"
  cat "$file"
done >"$out/all.rom"
truncate -s 32768 "$out/vga.bin"
printf '%s\n' "display_library: term" "memory: guest=256, host=256" "cpu: model=sapphire_rapids, reset_on_triple_fault=0" \
  "romimage: file=all.rom, address=0xffc00000" "vgaromimage: file=vga.bin" "parport1: enabled=1, file=out.bin" \
  "log: bochs.log" "panic: action=fatal" >"$out/bochsrc"
rm -f "$out"/{bochs.log,out.bin}
cd "$out"
LTDL_LIBRARY_PATH=root/usr/lib/x86_64-linux-gnu/bochs/plugins BXSHARE=root/usr/share/bochs TERM=xterm timeout 600 \
  root/usr/lib64/ld-linux-x86-64.so.2 --library-path root/usr/lib/x86_64-linux-gnu:root/usr/lib/x86_64-linux-gnu/bochs/plugins \
  root/usr/bin/bochs-bin -q -f bochsrc </dev/null >bochs.out 2>&1 || true  # it also exits with 1 at the end of a good run
grep -q "Shutdown port" bochs.log || { tail -20 bochs.log bochs.out >&2; echo "Bochs did not reach the end" >&2; exit 1; }
./host check "${run[@]}" out.bin "${more[@]}"
