// The machine's ROM, the 64 KiB below 4 GiB: from reset to 64-bit mode with AVX-512 and tiles switched on, then to the payload.
// Every exception ends the run: bochs.log then has its error code or address in R14, the address or CS in R15.
#define ROM 0xF0000
#define PAYLOAD 0x200000    // from 0xffc00000, 384 KiB
#define CASES 0x1000000     // from 0xffc60000, 3648 KiB
.code16
start16:
  cli
  lgdtl %cs:(gdtr - ROM)
  mov %cr0, %eax; or $1, %eax; mov %eax, %cr0
  ljmpl $8, $start32
.code32
start32:
  mov $16, %ax; mov %ax, %ds; mov %ax, %es; mov %ax, %ss
  mov $0x10000, %edi; xor %eax, %eax; mov $0x800, %ecx; cld; rep stosl
  movl $0x11003, 0x10000    // four pages of 1 GiB, virtual = physical
  movl $0x00000083, 0x11000; movl $0x40000083, 0x11008; movl $0x80000083, 0x11010; movl $0xc0000083, 0x11018
  mov $0x40620, %eax; mov %eax, %cr4    // PAE, OSFXSR, OSXMMEXCPT, OSXSAVE
  mov $0x10000, %eax; mov %eax, %cr3
  mov $0xc0000080, %ecx; rdmsr; or $0x100, %eax; wrmsr
  mov $0x80000023, %eax; mov %eax, %cr0    // PG, NE, MP, PE
  ljmp $24, $start64
.code64
start64:
  xor %ecx, %ecx; xor %edx, %edx; mov $0x600e7, %eax; xsetbv    // x87, SSE, AVX, AVX-512, tile configuration, tiles
  mov $0x14000, %edi; mov $32, %ecx
1: movw $(fault - ROM), (%rdi); movw $24, 2(%rdi); movw $0x8e00, 4(%rdi); movw $0xf, 6(%rdi); movq $0, 8(%rdi)
  add $16, %rdi; loop 1b
  lidt idtr(%rip)
  mov $0x1f0000, %esp
  mov $0xffc00000, %esi; mov $PAYLOAD, %edi; mov $0xc000, %ecx; rep movsq
  mov $0xffc60000, %esi; mov $CASES, %edi; mov $0x72000, %ecx; rep movsq
  mov $PAYLOAD, %eax; call *%rax
fault:
  mov (%rsp), %r14; mov 8(%rsp), %r15
  mov $0x8900, %edx; lea bye(%rip), %rsi    // Bochs ends when "Shutdown" is written to this port
2: lodsb; out %al, %dx; test %al, %al; jnz 2b
  hlt
bye: .asciz "Shutdown"
.align 8
gdt: .quad 0, 0x00cf9a000000ffff, 0x00cf92000000ffff, 0x00af9a000000ffff
gdtr: .word 31; .long gdt
idtr: .word 511; .quad 0x14000
.org 0xfff0
.code16
  ljmp $0xf000, $(start16 - ROM)
.org 0x10000
